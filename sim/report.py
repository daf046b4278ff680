"""One HTML file that shows what a run or a sweep did: no scripts, no fonts, nothing to fetch."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sim.runner import Result

_WIDTH: Final = 640
_HEIGHT: Final = 220
_LEFT: Final = 64
_BOTTOM: Final = 32
_TOP: Final = 12
_BARS: Final = 24
_COLOURS: Final = ("#1f6f8b", "#c8553d", "#588157", "#8e6c8a", "#d9a441")

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1020px;margin:2em auto;padding:0 1em}
body{color:#1c1c1c;background:#fff}
h1{font-size:1.5em;margin-bottom:0}h2{font-size:1.1em;margin:2em 0 .4em}p.caption{color:#555;margin-top:.2em}
table{border-collapse:collapse}td,th{padding:.2em 1em .2em 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}.ok{color:#2d6a4f}.bad{color:#b00020;font-weight:600}
figure{margin:0 1em 1em 0;display:inline-block}figcaption{font-size:.9em;color:#444}
svg text{font:11px system-ui,sans-serif;fill:#555}.foot{color:#777;font-size:.85em;margin-top:3em}
"""

Points = Sequence[tuple[float, float]]


def report(result: Result, caption: str) -> str:
    """The page of one run."""
    parts = [
        f"<h1>{html.escape(result.scenario)}</h1><p class=caption>{html.escape(caption)}</p>",
        _expectations(result),
        _table("What was measured", result.metrics),
        *_figures(result),
        _faults(result),
        f"<p class=foot>seed {result.seed}, level L{result.level}, {result.nodes} nodes, "
        f"{result.virtual_seconds:,.0f} virtual seconds in {result.cpu_seconds:.1f} CPU seconds, "
        f"{result.events:,} events, trace {result.trace_hash}</p>",
    ]
    return page(result.scenario, parts)


def page(title: str, parts: Sequence[str]) -> str:
    """A whole document."""
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def sweep_report(name: str, caption: str, summary: Mapping[str, Any]) -> str:
    """The page of a sweep: failures by seed, the spread of each metric, what was reached."""
    rows = "".join(
        f"<tr><td>{html.escape(str(row['changes'] or 'as it is'))}</td><td>{html.escape(metric)}</td>"
        + "".join(f"<td class=n>{_number(spread[key])}</td>" for key in ("min", "median", "max"))
        + "</tr>"
        for row in summary["settings"]
        for metric, spread in row["metrics"].items()
    )
    failed = "".join(
        f"<tr><td class=n>{entry['seed']}</td><td>{html.escape(str(entry['changes'] or ''))}</td>"
        f"<td class=bad>{html.escape(entry['why'])}</td></tr>"
        for entry in summary["failed"]
    )
    verdict = f"{len(summary['failed'])} of {summary['runs']} runs failed" if failed else "every run held"
    parts = [
        f"<h1>{html.escape(name)}, {summary['runs']} runs</h1><p class=caption>{html.escape(caption)}</p>",
        f"<p class={'bad' if failed else 'ok'}>{verdict}</p>",
        f"<table><tr><th>seed<th>setting<th>why</tr>{failed}</table>" if failed else "",
        "<h2>Metrics</h2><table><tr><th>setting<th>metric<th>least<th>median<th>most</tr>"
        + rows
        + "</table>",
        _table("What was reached (times, over all runs)", summary["witnessed"]),
        _table("Which sites misbehaved on purpose (times, over all runs)", summary["fired"]),
    ]
    return page(name, parts)


def _expectations(result: Result) -> str:
    rows = "".join(
        f"<tr><td class={'ok' if entry['ok'] else 'bad'}>{'met' if entry['ok'] else 'FAILED'}</td>"
        f"<td>{html.escape(str(entry['name']))}</td><td class=n>{_number(entry['value'])}</td></tr>"
        for entry in result.expectations
    )
    return f"<h2>Expectations</h2><table>{rows}</table>" if rows else ""


def _table(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td class=n>{_number(value)}</td></tr>"
        for name, value in values.items()
    )
    return f"<h2>{title}</h2><table>{rows}</table>" if rows else ""


def _faults(result: Result) -> str:
    rows = "".join(
        f"<tr><td class=n>{fault['at']:g} s</td><td>{html.escape(fault['kind'])}</td>"
        f"<td class=n>{fault['seconds']:g} s</td><td class=n>{fault['value']:g}</td>"
        f"<td>{html.escape(', '.join(fault['who'][:8]))}{' …' if len(fault['who']) > 8 else ''}</td></tr>"
        for fault in result.faults
    )
    head = "<tr><th>at<th>what<th>for<th>how bad<th>who</tr>"
    return f"<h2>What went wrong on purpose</h2><table>{head}{rows}</table>" if rows else ""


def _figures(result: Result) -> list[str]:
    figures = [line_plot(name, points, result.faults) for name, points in result.series.items()]
    figures += [histogram(name, values) for name, values in result.distributions.items()]
    return ["<h2>Over time, and over nodes</h2>", *figures] if figures else []


def _tick(value: float) -> str:
    """A number beside an axis: three digits and a thousands letter, for there is no room for more."""
    for power, letter in ((9, " G"), (6, " M"), (3, " k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.3g}{letter}"
    return f"{value:.3g}"


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
        return _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - 8)

    def y_of(y: float) -> float:
        return _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    shades = "".join(
        _shade(x_of(fault["at"]), x_of(min(right, fault["at"] + fault["seconds"])), fault["kind"])
        for fault in faults
        if left <= fault["at"] <= right
    )
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
    curve = f"<polyline points='{path}' fill=none stroke={_COLOURS[0]} stroke-width=1.6 />"
    return _figure(title, shades + curve + _axes((left, right), (low, high), "virtual seconds"))


def _shade(start: float, end: float, name: str) -> str:
    size = f"width={max(1.0, end - start):.1f} height={_HEIGHT - _TOP - _BOTTOM}"
    return f"<rect x={start:.1f} y={_TOP} {size} fill=#c8553d opacity=.06><title>{name}</title></rect>"


def histogram(title: str, values: Sequence[float]) -> str:
    """How many nodes have how much."""
    if not values:
        return ""
    low, high = _scale(min(values), max(values))
    counts = [0] * _BARS
    for value in values:
        counts[min(_BARS - 1, int((value - low) / (high - low) * _BARS))] += 1
    width = (_WIDTH - _LEFT - 8) / _BARS
    full = _HEIGHT - _TOP - _BOTTOM
    bars = "".join(
        f"<rect x={_LEFT + index * width:.1f} y={_TOP + full * (1 - count / max(counts)):.1f} "
        f"width={width - 1:.1f} height={full * count / max(counts):.1f} fill={_COLOURS[0]} />"
        for index, count in enumerate(counts)
    )
    return _figure(title, bars + _axes((low, high), (0, max(counts)), "", "nodes"))


def _axes(xs: tuple[float, float], ys: tuple[float, float], under: str, beside: str = "") -> str:
    base = _HEIGHT - _BOTTOM
    lines = f"<path d='M{_LEFT} {_TOP}V{base}H{_WIDTH - 8}' fill=none stroke=#999 />"
    texts = [
        (_LEFT - 6, _TOP + 8, "end", _tick(ys[1])),
        (_LEFT - 6, base, "end", _tick(ys[0])),
        (_LEFT, base + 16, "start", _tick(xs[0])),
        (_WIDTH - 8, base + 16, "end", _tick(xs[1])),
        ((_LEFT + _WIDTH) // 2, base + 16, "middle", under),
        (_LEFT - 6, (_TOP + base) // 2, "end", beside),
    ]
    return lines + "".join(
        f"<text x={x} y={y} text-anchor={anchor}>{html.escape(text)}</text>" for x, y, anchor, text in texts
    )


def _figure(title: str, content: str) -> str:
    svg = f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width={_WIDTH * 3 // 4} role=img>{content}</svg>"
    return f"<figure>{svg}<figcaption>{html.escape(title)}</figcaption></figure>"
