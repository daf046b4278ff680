"""One self-contained HTML file that shows a run or a sweep.

The browser draws it as it draws a node's page (`p2p.node.dashboard.page`): the element
``report`` has its sentences, charts and tables, ``data`` is the JSON that ``--json`` writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from typing import Any, Final

from p2p.node.dashboard.page import write_file
from sim.kernel.simulation import Simulation
from sim.run.meanings import MEANINGS, in_a_sentence
from sim.run.result import Result

BARS: Final = 24  # of a histogram: each wide enough to be pointed at on a phone
UNITS: Final = {"bytes": "bytes", "seconds": "seconds", "share": "share"}
"""The unit of a metric or a curve, by a word of its name; all others are counts."""

Points = Sequence[tuple[float, float]]
Chart = dict[str, Any]  # see Plot in p2p/node/dashboard/static/draw.js


def report(result: Result, caption: str, made_by: str = "") -> str:
    """Return the HTML page of one run; ``made_by`` is the command line."""
    failed = [entry for entry in result.expectations if not entry["ok"]]
    kept = len(result.expectations) - len(failed)
    verdict = f"{kept} of {len(result.expectations)} expectations met"
    if failed:
        verdict += ". FAILED: " + "; ".join(str(entry["name"]) for entry in failed)
    shades = [
        (fault["at"], fault["at"] + fault["seconds"], fault["kind"]) for fault in result.faults
    ]
    charts = [_lives(result.lives, result.virtual_seconds, shades)] if result.lives else []
    charts += [curve(name, points, shades) for name, points in result.series.items()]
    charts += [histogram(*item) for item in result.distributions.items() if item[1]]
    foot = (
        f"seed {result.seed}, level L{result.level}, {result.nodes} nodes,"
        f" {result.virtual_seconds:,.0f} virtual seconds in {result.cpu_seconds:.1f} CPU"
        f" seconds, {result.events:,} events, trace {result.trace_hash or '-'}; "
    )
    return _page(
        result.scenario,
        says=in_a_sentence(result),
        verdict=verdict if result.expectations else "",
        is_ok=result.ok,
        caption=caption,
        charts=charts,
        tables=[_measured(result), _faults(result)],
        foot=foot + _made(made_by),
        data=result.to_json(),
    )


def drawing(simulation: Simulation, title: str) -> str:
    """Return a page with the curves of a simulation that is no scenario (`Simulation.plot`)."""
    charts = [_lives(simulation.lives, simulation.now, ())] if simulation.lives else []
    charts += [curve(name, points) for name, points in simulation.series.items()]
    return _page("simulation", says=title, charts=charts, foot=_made(""))


def sweep_report(name: str, caption: str, summary: Mapping[str, Any], made_by: str = "") -> str:
    """Return the page of a sweep: failures by seed, the spread of each metric, witnessed
    claims.
    """
    settings, failures, runs = summary["settings"], summary["failed"], summary["runs"]
    expected = summary.get("expected", ())
    charts = sweep_charts(settings, expected) or seed_charts(settings, expected)
    failed = [
        [entry["seed"], setting(entry["changes"]) or "as it is", entry["why"]]
        for entry in failures
    ]
    spreads = [
        [{"what": metric, "why": setting(row["changes"]) or MEANINGS.get(metric, "")},
         [spread["median"], unit_of(metric)],
         *({"from": spread[low], "to": spread[high], "unit": unit_of(metric)}
           for low, high in (("low", "high"), ("min", "max")))]
        for row in settings
        for metric, spread in row["metrics"].items()
    ]  # fmt: skip
    head = ("metric", "median", "middle four fifths", "least to most")
    return _page(
        name,
        says=f"{runs - len(failures)} of {runs} runs of {name} met what is expected",
        verdict=f"{len(failures)} of {runs} runs failed" if failures else "every run held",
        is_ok=not failures,
        caption=caption,
        charts=charts,
        tables=[
            _table("Runs that failed", ("seed", "setting", "why"), failed),
            _table("Metrics", head, spreads),
            _counted("What was reached (times, over all runs)", summary["witnessed"]),
            _counted("Sites that misbehaved on purpose (times)", summary["fired"]),
        ],
        foot=_made(made_by),
        data=summary,
    )


def _page(title: str, *, data: object = None, **parts: Any) -> str:
    content = {"title": title, "charts": [], "tables": [], **parts}
    return write_file(
        "report.html", ("draw.js", "report.js"), {"report": content, "data": data}
    )


def _made(made_by: str) -> str:
    try:
        shoal = f"Shoal {version('shoal')}"
    except PackageNotFoundError:
        shoal = "Shoal"
    return f"made by {made_by + ', ' if made_by else ''}{shoal}"


def unit_of(title: str) -> str:
    """Return the unit of a metric or a curve, by the words of its name and of its meaning."""
    words = re.split(r"[ _,]+", title)
    unit = next((UNITS[word] for word in words if word in UNITS), "")
    if not unit and "share" in re.split(r"\W+", MEANINGS.get(title, "")):
        return "share"
    return unit + "/s" if unit == "bytes" and words[-2:] == ["per", "second"] else unit


def setting(changes: Mapping[str, object]) -> str:
    """Return the changes of a setting in words."""
    return ", ".join(f"{key} = {value}" for key, value in changes.items())


# Charts


def curve(title: str, points: Points, shades: Sequence[Sequence[Any]] = ()) -> Chart:
    """Return the chart of a curve over virtual seconds; faults are shaded."""
    line = {"label": title, "unit": unit_of(title), "points": points}
    return {"title": title, "about": "Over virtual time." + _shaded(shades), "lines": [line],
            "shades": shades, "x": {"label": "virtual time", "unit": "seconds"}}  # fmt: skip


def _shaded(shades: Sequence[Sequence[Any]]) -> str:
    return " Faults are shaded." if shades else ""


def _lives(
    lives: Mapping[str, Sequence[Sequence[float]]], end: float, shades: Sequence[Sequence[Any]]
) -> Chart:
    """Return the chart of lives: a row for each node, filled while it lives."""
    spans = [
        (row, life[0], life[1] if len(life) > 1 else end)
        for row, own in enumerate(lives.values())
        for life in own
    ]
    changes = sorted([(at, 1) for _, at, _ in spans] + [(to, -1) for _, _, to in spans])
    points: list[tuple[float, int, str]] = []
    living, last = 0, max((at for at, _ in changes), default=0.0)
    for at, change in changes:
        living += change if change > 0 or at < last else 0
        note = f"{living:,} of {len(lives):,} nodes live"
        if points and points[-1][0] == at:
            points.pop()
        points.append((at, living, note))
    if len(points) > 2000:  # more than a screen has pixels
        points = points[:: len(points) // 1000]
    about = "A row for each node, filled while it lives." + _shaded(shades)
    line = {"label": "nodes that live", "unit": "", "points": points, "hidden": True}
    return {"title": "The swarm over time", "about": about, "lines": [line], "rows": len(lives),
            "lives": spans, "shades": shades,
            "x": {"label": "virtual time", "unit": "seconds"}}  # fmt: skip


def histogram(title: str, values: Sequence[float]) -> Chart:
    """Return a histogram of the nodes' values."""
    low, high, unit = min(values, default=0), max(values, default=0), unit_of(title)
    width = (high - low) / BARS or 1.0
    counts = [0] * BARS
    for value in values:
        counts[min(BARS - 1, int((value - low) / width))] += 1
    ends = pairwise(low + index * width for index in range(BARS + 1))
    points = [
        (round(start + width / 2, 9), count, f"{count:,} from {start:,.4g} to {end:,.4g}")
        for (start, end), count in zip(ends, counts, strict=True)
    ]
    line = {"label": title, "unit": "", "points": points, "bars": True}
    return {"title": title, "about": f"How many of {len(values):,} have which value.",
            "lines": [line], "x": {"label": title.partition(",")[0], "unit": unit}}  # fmt: skip


def sweep_charts(settings: Sequence[Mapping[str, Any]], expected: Sequence[str]) -> list[Chart]:
    """Return a chart for each pair of a varied number and an expected metric.

    A chart has a line of medians for each combination of the other settings.
    """
    charts = []
    for key in dict.fromkeys(key for row in settings for key in row["changes"]):
        values = [row["changes"].get(key) for row in settings]
        if len(set(values)) < 2 or not all(type(value) in (int, float) for value in values):
            continue
        for metric in expected:
            chart = _chart(f"{metric} by {key}", key)
            lines: dict[str, list[Any]] = {}
            for row in sorted(settings, key=lambda row: float(row["changes"][key])):
                if (spread := row["metrics"].get(metric)) is None:
                    continue
                at = row["changes"][key]
                others = {k: v for k, v in row["changes"].items() if k != key}
                points = lines.setdefault(setting(others), [])
                place = list(lines).index(setting(others))
                points.append((at, spread["median"]))
                chart["whiskers"].append((at, spread["low"], spread["high"], place))
                chart["dots"] += _dots(row, metric, place, at)
            chart["lines"] = _lines(lines, metric)
            charts += [chart] if lines else []
    return charts


def seed_charts(settings: Sequence[Mapping[str, Any]], expected: Sequence[str]) -> list[Chart]:
    """Return a chart of each metric over the seeds, for sweeps that vary no number."""
    charts = []
    for metric in expected:
        chart, lines = _chart(f"{metric} by seed", "seed"), dict[str, list[Any]]()
        for row in settings:
            if runs := row["points"].get(metric):
                spread, place = row["metrics"][metric], len(lines)
                seeds = [seed for seed, _ in runs]
                ends = dict.fromkeys((min(seeds), max(seeds)))
                lines[setting(row["changes"])] = [(seed, spread["median"]) for seed in ends]
                chart["bands"].append((spread["low"], spread["high"], place))
                chart["dots"] += _dots(row, metric, place)
        chart["lines"] = _lines(lines, metric)
        charts += [chart] if lines else []
    return charts


def _chart(title: str, x: str) -> Chart:
    return {"title": title, "about": "Each run, the median, and the middle four fifths.",
            "x": {"label": x}, "whiskers": [], "bands": [], "dots": []}  # fmt: skip


def _lines(lines: Mapping[str, Points], metric: str) -> list[dict[str, Any]]:
    return [
        {"label": name or "median", "unit": unit_of(metric), "points": points}
        for name, points in lines.items()
    ]


def _dots(
    row: Mapping[str, Any], metric: str, place: int, at: float | None = None
) -> list[Any]:
    return [
        (seed if at is None else at, value, place, f"seed {seed:g}")
        for seed, value in row["points"].get(metric, ())
    ]


# Tables; report.js says what a cell may be


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    return {"title": title, "head": head, "rows": rows}


def _counted(title: str, values: Mapping[str, int]) -> dict[str, Any]:
    return _table(title, ("what", "times"), [list(row) for row in values.items()])


def _measured(result: Result) -> dict[str, Any]:
    """Return every metric, first those with an expectation."""
    rows: dict[str, list[Any]] = {}
    for entry in result.expectations:
        name, sign, _ = str(entry["name"]).split()
        words = (
            f"{'met' if entry['ok'] else 'FAILED'}: at {'least' if sign == '>=' else 'most'}"
        )
        rows[str(entry["name"])] = [
            name,
            entry["value"],
            [entry["limit"], unit_of(name), words],
        ]
    told = {row[0] for row in rows.values()}
    rows |= {
        name: [name, value, ""] for name, value in result.metrics.items() if name not in told
    }
    cells = [
        [{"what": name, "why": MEANINGS.get(name, "")}, [value, unit_of(name)], expected]
        for name, value, expected in rows.values()
    ]
    return _table("What was measured", ("what", "is", "expected"), cells)


def _faults(result: Result) -> dict[str, Any]:
    rows = [
        [{"what": fault["kind"], "why": ", ".join(fault["who"][:8])
          + (" …" if len(fault["who"]) > 8 else "")},
         [fault["at"], "seconds"], [fault["seconds"], "seconds"], fault["value"]]
        for fault in result.faults
    ]  # fmt: skip
    return _table("What went wrong on purpose", ("what", "at", "for", "how bad"), rows)
