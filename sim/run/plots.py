"""Drawings of a report: curves, spreads over a parameter, points over seeds, histograms.

Each is an SVG with a name for screen readers. Colours are classes, since the page has a light
and a dark scheme.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_WIDTH: Final = 480
"""Width of a chart in pixels: two fit beside each other on a laptop."""
_HEIGHT: Final = 190
"""Height of a chart in pixels."""
_LEFT: Final = 60
"""Room for the numbers beside the axis."""
_RIGHT: Final = 24
"""Room for half of the last number below the axis."""
_TICKS: Final = 4
"""Numbers along an axis at most, or one more: the room of a phone's 360 pixels."""
_COUNT: Final = ""
"""The unit of what is counted: its title says what."""
_UNITS: Final = {"bytes": "B", "seconds": "s", "share": "%", "probability": "%"}
"""The unit of a metric, by a word of its name; all others are counts."""
_BOTTOM: Final = 32
"""Room for the numbers below the axis."""
_TOP: Final = 12
"""Room above the highest point."""
_BARS: Final = 24
"""Bars of a histogram: each wide enough to be pointed at, 16 pixels."""
_COLOURS: Final = 4
"""Of curves beside each other; the fifth has the first one's again."""

Points = Sequence[tuple[float, float]]


def _tick(value: float, unit: str) -> str:
    """A number beside an axis: three digits, a thousands letter and the unit; there is no room
    for more."""
    if unit == "%":
        return f"{100 * value:.3g} %"
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power and unit != "s":
            return f"{value / 10**power:.3g} {letter}{unit}"
    return f"{value:.6g} {unit}".rstrip() if unit == "s" else f"{value:.3g} {unit}".rstrip()


def unit_of(title: str) -> str:
    """The unit of a metric or a curve, by the words of its name."""
    words = re.split(r"[ _,]+", title)
    unit = next((_UNITS[word] for word in words if word in _UNITS), _COUNT)
    return unit + "/s" if unit and words[-2:] == ["per", "second"] else unit


def _round_numbers(low: float, high: float) -> list[float]:
    """Numbers from ``low`` to ``high`` that people count in: steps of 1, 2 or 5 times a power
    of ten."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9)
    )
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: Any) -> str:
    """A value in a table: thousands with commas, four digits of a fraction."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return html.escape(str(value))
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _scale(low: float, high: float) -> tuple[float, float]:
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def line_plot(title: str, points: Points, faults: Sequence[Mapping[str, Any]] = ()) -> str:
    """A curve over virtual seconds; faults are shaded."""
    if not points:
        return ""
    left, right = _scale(points[0][0], points[-1][0])
    low, high = _scale(min(0.0, min(y for _, y in points)), max(y for _, y in points))

    def x_of(x: float) -> float:
        return _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(y: float) -> float:
        return _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    shades = "".join(
        _shade(
            x_of(fault["at"]), x_of(min(right, fault["at"] + fault["seconds"])), fault["kind"]
        )
        for fault in faults
        if left <= fault["at"] <= right
    )
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
    curve = f"<polyline points='{path}' class=s0 />"
    unit = unit_of(title)
    axes = _axis_x((left, right), x_of, "virtual time", "s") + _axis_y((low, high), y_of, unit)
    ends = f"from {_tick(points[0][1], unit)} to {_tick(points[-1][1], unit)}"
    return _figure(title, f"{title}: a curve over virtual time, {ends}", shades + curve + axes)


def sweep_plots(settings: Sequence[Mapping[str, Any]], expected: Sequence[str]) -> list[str]:
    """A drawing for each number that was varied and each metric that the scenario expects
    something of: one curve for each combination of the other settings."""
    plots = []
    for key in dict.fromkeys(key for row in settings for key in row["changes"]):
        if not all(_is_number(row["changes"].get(key)) for row in settings):
            continue
        if len({row["changes"][key] for row in settings}) < 2:
            continue
        for metric in expected:
            curves: dict[str, list[Spot]] = {}
            for row in settings:
                if metric in row["metrics"]:
                    others = {k: v for k, v in row["changes"].items() if k != key}
                    curves.setdefault(setting(others), []).append(
                        Spot(float(row["changes"][key]), row["metrics"][metric],
                             row["points"].get(metric, ()))
                    )  # fmt: skip
            if curves:
                plots.append(_spread_plot(key, metric, curves))
    return plots


def setting(changes: Mapping[str, object]) -> str:
    """What was varied, in words."""
    return ", ".join(f"{key} = {value}" for key, value in changes.items())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def seed_plots(settings: Sequence[Mapping[str, Any]], expected: Sequence[str]) -> list[str]:
    """Where no number was varied: each metric over the seeds, a colour for each setting."""
    plots = []
    for metric in expected:
        rows = [row for row in settings if row["points"].get(metric)]
        if rows:
            plots.append(_seed_plot(metric, rows))
    return plots


def _seed_plot(metric: str, rows: Sequence[Mapping[str, Any]]) -> str:
    points = [point for row in rows for point in row["points"][metric]]
    ends_x = _scale(min(x for x, _ in points), max(x for x, _ in points))
    frame = _Frame(ends_x, _scale(min(0.0, *(y for _, y in points)), max(y for _, y in points)))
    drawn = []
    for place, row in enumerate(rows):
        colour, spread = place % _COLOURS, row["metrics"][metric]
        top, middle, bottom = (frame.y(spread[key]) for key in ("high", "median", "low"))
        drawn.append(
            f"<rect x={_LEFT} y={top:.1f} width={_WIDTH - _LEFT - _RIGHT} "
            f"height={max(1.0, bottom - top):.1f} class='f{colour} band' />"
            f"<path d='M{_LEFT} {middle:.1f}H{_WIDTH - _RIGHT}' class=s{colour} />"
        )
        drawn += [_dot(frame.x(x), frame.y(y), colour, x, y) for x, y in row["points"][metric]]
        drawn += _key(setting(row["changes"]), place)
    title = f"{metric} by seed"
    said = f"{title}: {len(points)} runs, medians, and where four fifths of them lie"
    axes = _axis_x(ends_x, frame.x, "seed", "", whole=True) + _axis_y(
        frame.ys, frame.y, unit_of(metric)
    )
    return _figure(title, said, "".join(drawn) + axes)


@dataclass(frozen=True, slots=True)
class Spot:
    """What a metric came to at one value of a parameter."""

    at: float
    spread: Mapping[str, float]
    runs: Points
    """Seed and value, of some or all of them."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where numbers lie in a drawing."""

    xs: tuple[float, float]
    ys: tuple[float, float]

    def x(self, value: float) -> float:
        left, right = self.xs
        return _LEFT + (value - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.ys
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def _spread_plot(key: str, metric: str, curves: Mapping[str, Sequence[Spot]]) -> str:
    """Medians joined by a line, the interval of each as a bar, each run as a point."""
    spots = [spot for curve in curves.values() for spot in curve]
    values = [value for spot in spots for _, value in spot.runs]
    values += [spot.spread[end] for spot in spots for end in ("low", "high")]
    ends_x = _scale(min(spot.at for spot in spots), max(spot.at for spot in spots))
    frame = _Frame(ends_x, _scale(min(0.0, *values), max(values)))
    drawn: list[str] = []
    for place, (name, curve) in enumerate(curves.items()):
        drawn += _curve(frame, curve, place % _COLOURS, name)
        drawn += _key(name, place)
    axes = _axis_x(ends_x, frame.x, key, "") + _axis_y(frame.ys, frame.y, unit_of(metric))
    title = f"{metric} by {key}"
    names = "; ".join(name for name in curves if name)
    said = f"{title}: medians with intervals" + (f", a curve for each of {names}" * bool(names))
    return _figure(title, said, "".join(drawn) + axes)


def _curve(frame: _Frame, curve: Sequence[Spot], colour: int, name: str) -> Iterator[str]:
    path = " ".join(
        f"{frame.x(spot.at):.1f},{frame.y(spot.spread['median']):.1f}"
        for spot in sorted(curve, key=lambda spot: spot.at)
    )
    yield f"<polyline points='{path}' class=s{colour}>"
    yield f"<title>{html.escape(name)}</title></polyline>"
    for spot in curve:
        x, low, high = frame.x(spot.at), *(frame.y(spot.spread[end]) for end in ("low", "high"))
        yield f"<path d='M{x:.1f} {low:.1f}V{high:.1f}' class='s{colour} spread' />"
        yield from (_dot(x, frame.y(y), colour, seed, y) for seed, y in spot.runs)


def _dot(x: float, y: float, colour: int, seed: float, value: float) -> str:
    title = f"<title>seed {seed:g}: {value:g}</title>"
    return f"<circle cx={x:.1f} cy={y:.1f} r=2.2 class='f{colour} seed'>{title}</circle>"


def _key(name: str, place: int) -> list[str]:
    """Which curve has which colour, in the lower right corner."""
    if not name:
        return []
    at = f"x={_WIDTH - _RIGHT} y={_HEIGHT - _BOTTOM - 20 - 14 * place}"
    return [f"<text {at} text-anchor=end class=f{place % _COLOURS}>{html.escape(name)}</text>"]


def _shade(start: float, end: float, name: str) -> str:
    size = f"width={max(1.0, end - start):.1f} height={_HEIGHT - _TOP - _BOTTOM}"
    title = f"<title>{html.escape(name)}</title>"
    return f"<rect x={start:.1f} y={_TOP} {size} class=fault>{title}</rect>"


def histogram(title: str, values: Sequence[float]) -> str:
    """A histogram: how many nodes have which value."""
    if not values:
        return ""
    low, high = _scale(min(values), max(values))
    counts = [0] * _BARS
    for value in values:
        counts[min(_BARS - 1, int((value - low) / (high - low) * _BARS))] += 1
    width = (_WIDTH - _LEFT - _RIGHT) / _BARS
    full = _HEIGHT - _TOP - _BOTTOM
    bars = "".join(
        f"<rect x={_LEFT + index * width:.1f} y={_TOP + full * (1 - count / max(counts)):.1f} "
        f"width={width - 1:.1f} height={full * count / max(counts):.1f} class=f0 />"
        for index, count in enumerate(counts)
    )
    unit = unit_of(title)
    axes = _axis_x(
        (low, high), lambda x: _LEFT + (x - low) / (high - low) * width * _BARS, "", unit
    )
    axes += _axis_y((0, max(counts)), lambda y: _TOP + full * (1 - y / max(counts)), _COUNT)
    span = f"{_tick(min(values), unit)} to {_tick(max(values), unit)}"
    return _figure(
        title, f"{title}: a histogram of {len(values):,} values, {span}", bars + axes
    )


def _axis_x(
    ends: tuple[float, float], x_of: Callable[[float], float], under: str, unit: str,
    *, whole: bool = False,
) -> str:  # fmt: skip
    base = _HEIGHT - _BOTTOM
    texts = [
        (x_of(value), base + 16, "middle", _tick(value, unit))
        for value in _round_numbers(*ends)
        if not whole or value == round(value)
    ]
    texts += [(_WIDTH - _RIGHT, base - 6, "end", under)] if under else []
    return f"<path d='M{_LEFT} {base}H{_WIDTH - _RIGHT}' class=axis />{_texts(texts)}"


def _axis_y(ends: tuple[float, float], y_of: Callable[[float], float], unit: str) -> str:
    base = _HEIGHT - _BOTTOM
    texts = [
        (_LEFT - 6.0, y_of(value) + 4, "end", _tick(value, unit))
        for value in _round_numbers(*ends)
    ]
    return f"<path d='M{_LEFT} {_TOP}V{base}' class=axis />{_texts(texts)}"


def _texts(texts: Sequence[tuple[float, float, str, str]]) -> str:
    return "".join(
        f"<text x={x:.1f} y={y:.1f} text-anchor={anchor}>{html.escape(text)}</text>"
        for x, y, anchor, text in texts
    )


def _figure(title: str, name: str, content: str) -> str:
    """A drawing with a name, which is what a screen reader says in its place."""
    size = f"viewBox='0 0 {_WIDTH} {_HEIGHT}' width={_WIDTH}"
    svg = f'<svg {size} role=img aria-label="{html.escape(name)}">{content}</svg>'
    return f"<figure>{svg}<figcaption>{html.escape(title)}</figcaption></figure>"
