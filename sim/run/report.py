"""One HTML file that shows what a run or a sweep did, with nothing to fetch or to execute."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from sim.kernel.simulation import Simulation
from sim.run.result import Result

_WIDTH: Final = 480
"""Of a chart, in pixels: two beside each other on a laptop's screen."""
_HEIGHT: Final = 190
"""Of a chart, in pixels."""
_LEFT: Final = 60
"""Room for the numbers beside the axis."""
_RIGHT: Final = 24
"""Room for half of the last number below the axis."""
_TICKS: Final = 4
"""Numbers along an axis at most, or one more: the room of a phone's 360 pixels."""
_COUNT: Final = ""
"""The unit of what is counted: its title says what."""
_UNITS: Final = {"bytes": "B", "seconds": "s", "share": "%", "probability": "%"}
"""The unit of a curve or histogram, by the first word of its title; all others are counts."""
_BOTTOM: Final = 32
"""Room for the numbers below the axis."""
_TOP: Final = 12
"""Room above the highest point."""
_BARS: Final = 24
"""Bars of a histogram: each wide enough to be pointed at, 16 pixels."""
_COLOURS: Final = ("#1f6f8b", "#c8553d", "#588157", "#8e6c8a", "#d9a441")

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1020px;margin:2em auto;padding:0 1em}
body{color:#1c1c1c;background:#fff}
h1{font-size:1.5em;margin-bottom:0}h2{font-size:1.1em;margin:2em 0 .4em}
p.caption{color:#555;margin-top:.2em}
table{border-collapse:collapse}td,th{padding:.2em 1em .2em 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}.ok{color:#2d6a4f}.bad{color:#b00020;font-weight:600}
figure{margin:0 1em 1em 0;display:inline-block}figcaption{font-size:.9em;color:#444}
svg{max-width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#444}
.wide{overflow-x:auto}.foot{color:#555;font-size:.85em;margin-top:3em;overflow-wrap:anywhere}
"""

Points = Sequence[tuple[float, float]]


def report(result: Result, caption: str, made_by: str = "") -> str:
    """The page of one run; ``made_by`` is the command line."""
    parts = [
        f"<h1>{html.escape(result.scenario)}</h1><p class=caption>{html.escape(caption)}</p>",
        _expectations(result),
        _table("What was measured", result.metrics),
        *_figures(result),
        _faults(result),
        f"<p class=foot>seed {result.seed}, level L{result.level}, {result.nodes} nodes, "
        f"{result.virtual_seconds:,.0f} virtual seconds "
        f"in {result.cpu_seconds:.1f} CPU seconds, "
        f"{result.events:,} events, trace {result.trace_hash or '-'}</p>",
    ]
    return page(result.scenario, parts, made_by)


def drawing(simulation: Simulation, title: str) -> str:
    """A page with the curves of a simulation that is no scenario (`Simulation.plot`)."""
    curves = [line_plot(name, points) for name, points in simulation.series.items()]
    return page(title, [f"<h1>{html.escape(title)}</h1>", *curves])


def page(title: str, parts: Sequence[str], made_by: str = "") -> str:
    """A whole HTML document: head, parts, and what made it."""
    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
    )
    command = f"made by <code>{html.escape(made_by)}</code>, " if made_by else "made by "
    foot = f"<p class=foot>{command}Shoal {html.escape(_version())}</p>"
    body = f"<main>{''.join(parts)}{foot}</main>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


def _version() -> str:
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "that is not installed"


def sweep_report(name: str, caption: str, summary: Mapping[str, Any], made_by: str = "") -> str:
    """The page of a sweep: failures by seed, the spread of each metric, what was reached."""
    rows = "".join(
        f"<tr><td>{html.escape(_setting(row['changes']) or 'as it is')}</td>"
        f"<td>{html.escape(metric)}</td>"
        + "".join(
            f"<td class=n>{_number(spread[key])}</td>"
            for key in ("min", "low", "median", "high", "max")
        )
        + "</tr>"
        for row in summary["settings"]
        for metric, spread in row["metrics"].items()
    )
    plots = sweep_plots(summary["settings"], summary.get("expected", ()))
    failed = "".join(
        f"<tr><td class=n>{entry['seed']}</td>"
        f"<td>{html.escape(str(entry['changes'] or ''))}</td>"
        f"<td class=bad>{html.escape(entry['why'])}</td></tr>"
        for entry in summary["failed"]
    )
    verdict = (
        f"{len(summary['failed'])} of {summary['runs']} runs failed"
        if failed
        else "every run held"
    )
    parts = [
        f"<h1>{html.escape(name)}, {summary['runs']} runs</h1>"
        f"<p class=caption>{html.escape(caption)}</p>",
        f"<p class={'bad' if failed else 'ok'}>{verdict}</p>",
        _rows("", ("seed", "setting", "why"), failed),
        *(
            ["<h2>By setting: median, and the middle four fifths of the seeds</h2>"]
            if plots
            else []
        ),
        *plots,
        _rows(
            "Metrics", ("setting", "metric", "least", "10 %", "median", "90 %", "most"), rows
        ),
        _table("What was reached (times, over all runs)", summary["witnessed"]),
        _table("Which sites misbehaved on purpose (times, over all runs)", summary["fired"]),
    ]
    return page(name, parts, made_by)


def _rows(title: str, head: Sequence[str], rows: str) -> str:
    """A table with a heading above it and one on each column; nothing without rows."""
    if not rows:
        return ""
    columns = "".join(f"<th scope=col>{name}</th>" for name in head)
    heading = f"<h2>{title}</h2>" if title else ""
    return f"{heading}<div class=wide tabindex=0><table><tr>{columns}</tr>{rows}</table></div>"


def _expectations(result: Result) -> str:
    rows = "".join(
        f"<tr><td class={'ok' if entry['ok'] else 'bad'}>"
        f"{'met' if entry['ok'] else 'FAILED'}</td>"
        f"<td>{html.escape(str(entry['name']))}</td>"
        f"<td class=n>{_number(entry['value'])}</td></tr>"
        for entry in result.expectations
    )
    return _rows("Expectations", ("verdict", "what", "is"), rows)


def _table(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td class=n>{_number(value)}</td></tr>"
        for name, value in values.items()
    )
    return _rows(title, ("what", "value"), rows)


def _faults(result: Result) -> str:
    rows = "".join(
        f"<tr><td class=n>{fault['at']:g} s</td><td>{html.escape(fault['kind'])}</td>"
        f"<td class=n>{fault['seconds']:g} s</td><td class=n>{fault['value']:g}</td>"
        f"<td>{html.escape(', '.join(fault['who'][:8]))}"
        f"{' …' if len(fault['who']) > 8 else ''}</td></tr>"
        for fault in result.faults
    )
    return _rows("What went wrong on purpose", ("at", "what", "for", "how bad", "who"), rows)


def _figures(result: Result) -> list[str]:
    figures = [line_plot(name, points, result.faults) for name, points in result.series.items()]
    figures += [histogram(name, values) for name, values in result.distributions.items()]
    return ["<h2>Over time, and over nodes</h2>", *figures] if figures else []


def _tick(value: float, unit: str) -> str:
    """A number beside an axis: three digits, a thousands letter and the unit; there is no room
    for more."""
    if unit == "%":
        return f"{100 * value:.3g} %"
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power and unit != "s":
            return f"{value / 10**power:.3g} {letter}{unit}"
    return f"{value:.6g} {unit}".rstrip() if unit == "s" else f"{value:.3g} {unit}".rstrip()


def _unit(title: str) -> str:
    return _UNITS.get(title.split()[0], _COUNT)


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


def _number(value: Any) -> str:
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
    curve = f"<polyline points='{path}' fill=none stroke={_COLOURS[0]} stroke-width=1.6 />"
    unit = _unit(title)
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
            curves: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
            for row in settings:
                if metric in row["metrics"]:
                    others = {k: v for k, v in row["changes"].items() if k != key}
                    curves.setdefault(_setting(others), []).append(
                        (float(row["changes"][key]), row["metrics"][metric])
                    )
            if curves:
                plots.append(_spread_plot(key, metric, curves))
    return plots


def _setting(changes: Mapping[str, object]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in changes.items())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _spread_plot(
    key: str,
    metric: str,
    curves: Mapping[str, Sequence[tuple[float, Mapping[str, float]]]],
) -> str:
    """Medians joined by a line, and the interval of each as a bar."""
    points = [point for curve in curves.values() for point in curve]
    left, right = _scale(min(x for x, _ in points), max(x for x, _ in points))
    low, high = _scale(
        min(0.0, *(spread["low"] for _, spread in points)),
        max(spread["high"] for _, spread in points),
    )

    def x_of(x: float) -> float:
        return _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(y: float) -> float:
        return _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    drawn = []
    for number, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(
            f"{x_of(x):.1f},{y_of(s['median']):.1f}"
            for x, s in sorted(curve, key=lambda p: p[0])
        )
        title = f"<title>{html.escape(name)}</title>"
        drawn.append(
            f"<polyline points='{path}' fill=none stroke={colour} stroke-width=1.6>"
            f"{title}</polyline>"
        )
        drawn += [
            f"<path d='M{x_of(x):.1f} {y_of(s['low']):.1f}V{y_of(s['high']):.1f}' "
            f"stroke={colour} stroke-width=4 opacity=.35 />"
            for x, s in curve
        ]
        if name:
            drawn.append(
                f"<text x={_WIDTH - _RIGHT} y={_HEIGHT - _BOTTOM - 20 - 14 * number} "
                f"text-anchor=end style='fill:{colour}'>{html.escape(name)}</text>"
            )
    unit = _unit(metric)
    axes = _axis_x((left, right), x_of, key, "") + _axis_y((low, high), y_of, unit)
    title = f"{metric} by {key}"
    names = "; ".join(name for name in curves if name)
    said = f"{title}: medians with intervals" + (f", a curve for each of {names}" * bool(names))
    return _figure(title, said, "".join(drawn) + axes)


def _shade(start: float, end: float, name: str) -> str:
    size = f"width={max(1.0, end - start):.1f} height={_HEIGHT - _TOP - _BOTTOM}"
    title = f"<title>{html.escape(name)}</title>"
    return f"<rect x={start:.1f} y={_TOP} {size} fill=#c8553d opacity=.06>{title}</rect>"


def histogram(title: str, values: Sequence[float]) -> str:
    """How many nodes have how much."""
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
        f"width={width - 1:.1f} height={full * count / max(counts):.1f} fill={_COLOURS[0]} />"
        for index, count in enumerate(counts)
    )
    unit = _unit(title)
    axes = _axis_x(
        (low, high), lambda x: _LEFT + (x - low) / (high - low) * width * _BARS, "", unit
    )
    axes += _axis_y((0, max(counts)), lambda y: _TOP + full * (1 - y / max(counts)), _COUNT)
    span = f"{_tick(min(values), unit)} to {_tick(max(values), unit)}"
    return _figure(
        title, f"{title}: a histogram of {len(values):,} values, {span}", bars + axes
    )


def _axis_x(
    ends: tuple[float, float], x_of: Callable[[float], float], under: str, unit: str
) -> str:
    base = _HEIGHT - _BOTTOM
    texts = [
        (x_of(value), base + 16, "middle", _tick(value, unit))
        for value in _round_numbers(*ends)
    ]
    texts += [(_WIDTH - _RIGHT, base - 6, "end", under)] if under else []
    return (
        f"<path d='M{_LEFT} {base}H{_WIDTH - _RIGHT}' fill=none stroke=#999 />{_texts(texts)}"
    )


def _axis_y(ends: tuple[float, float], y_of: Callable[[float], float], unit: str) -> str:
    base = _HEIGHT - _BOTTOM
    texts = [
        (_LEFT - 6.0, y_of(value) + 4, "end", _tick(value, unit))
        for value in _round_numbers(*ends)
    ]
    return f"<path d='M{_LEFT} {_TOP}V{base}' fill=none stroke=#999 />{_texts(texts)}"


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
