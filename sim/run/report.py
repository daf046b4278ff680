"""One HTML file that shows what a run or a sweep did, with nothing to fetch or to execute.

It looks as a node's page does, whose colours it has. What it shows is in it as data, too: the
element ``data`` is the JSON that ``--json`` writes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from p2p.node.dashboard.page import read_part
from sim.kernel.simulation import Simulation
from sim.run.meanings import MEANINGS
from sim.run.plots import (
    histogram,
    line_plot,
    number,
    seed_plots,
    setting,
    sweep_plots,
    unit_of,
)
from sim.run.result import Result

_STYLE: Final = """
html{background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
body{max-width:1060px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin-bottom:0}h2{font-size:1.1em;margin:2em 0 .4em}
p.caption{color:var(--quiet);margin-top:.2em}
table{border-collapse:collapse}td,th{padding:.2em 1em .2em 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}.ok{color:var(--good)}.bad{color:var(--bad);font-weight:600}
figure{margin:0 1em 1em 0;padding:12px;display:inline-block}
figure{max-width:100%;box-sizing:border-box}
figure{background:var(--card);border:1px solid var(--line);border-radius:12px}
figcaption{font-size:.9em;color:var(--quiet)}
svg{max-width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:var(--quiet)}
.axis,.s0,.s1,.s2,.s3{fill:none;stroke-width:1.6}.axis{stroke:var(--quiet);stroke-width:1}
.s0{stroke:var(--one)}.s1{stroke:var(--two)}.s2{stroke:var(--three)}.s3{stroke:var(--four)}
.f0{fill:var(--one)}.f1{fill:var(--two)}.f2{fill:var(--three)}.f3{fill:var(--four)}
.spread{stroke-width:4;opacity:.35}.seed{opacity:.55}.fault{fill:var(--two);opacity:.14}
.band{opacity:.14}td.n{white-space:nowrap}td.why{color:var(--quiet);max-width:60ch;min-width:30ch}
.wide{overflow-x:auto}.foot{color:var(--quiet);font-size:.85em;margin-top:3em;overflow-wrap:anywhere}
"""


def report(result: Result, caption: str, made_by: str = "") -> str:
    """The page of one run; ``made_by`` is the command line."""
    parts = [
        f"<h1>{html.escape(result.scenario)}</h1><p class=caption>{html.escape(caption)}</p>",
        _expectations(result),
        _measured(result),
        *_figures(result),
        _faults(result),
        f"<p class=foot>seed {result.seed}, level L{result.level}, {result.nodes} nodes, "
        f"{result.virtual_seconds:,.0f} virtual seconds "
        f"in {result.cpu_seconds:.1f} CPU seconds, "
        f"{result.events:,} events, trace {result.trace_hash or '-'}</p>",
    ]
    return page(result.scenario, parts, made_by, data=result.to_json())


def drawing(simulation: Simulation, title: str) -> str:
    """A page with the curves of a simulation that is no scenario (`Simulation.plot`)."""
    curves = [line_plot(name, points) for name, points in simulation.series.items()]
    return page(title, [f"<h1>{html.escape(title)}</h1>", *curves])


def page(title: str, parts: Sequence[str], made_by: str = "", *, data: object = None) -> str:
    """A whole HTML document: head, parts, what made it, and the ``data`` that it shows."""
    style = _palette() + _STYLE
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rule = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'"
    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width,initial-scale=1'>"
        f'<meta http-equiv="Content-Security-Policy" content="{rule}">'
        "<meta name=color-scheme content='light dark'>"
        f"<title>{html.escape(title)}</title><style>{style}</style>"
    )
    command = f"made by <code>{html.escape(made_by)}</code>, " if made_by else "made by "
    foot = f"<p class=foot>{command}Shoal {html.escape(_version())}</p>"
    body = f"<main>{''.join(parts)}{foot}</main>"
    if data is not None:
        # Inside of a script element only the sign that ends it has a meaning to HTML.
        text = json.dumps(data).replace("<", "\\u003c")
        body += f'<script type="application/json" id="data">{text}</script>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{body}</body></html>\n"


def _palette() -> str:
    """The colours of a node's page, light and dark."""
    return read_part("page.css").decode().partition("\n* {")[0]


def _version() -> str:
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "that is not installed"


def sweep_report(name: str, caption: str, summary: Mapping[str, Any], made_by: str = "") -> str:
    """The page of a sweep: failures by seed, the spread of each metric, what was reached."""
    settings, failures = summary["settings"], summary["failed"]
    failed = "".join(
        f"<tr><td class=n>{entry['seed']}</td>"
        f"<td>{html.escape(str(entry['changes'] or ''))}</td>"
        f"<td class=bad>{html.escape(entry['why'])}</td></tr>"
        for entry in failures
    )
    verdict = (
        f"{len(failures)} of {summary['runs']} runs failed" if failed else "every run held"
    )
    parts = [
        f"<h1>{html.escape(name)}, {summary['runs']} runs</h1>"
        f"<p class=caption>{html.escape(caption)}</p>",
        f"<p class={'bad' if failed else 'ok'}>{verdict}</p>",
        _rows("", ("seed", "setting", "why"), failed),
        *_drawn(settings, summary.get("expected", ())),
        _spreads(settings),
        _meanings(settings),
        _table("What was reached (times, over all runs)", summary["witnessed"]),
        _table("Which sites misbehaved on purpose (times, over all runs)", summary["fired"]),
    ]
    return page(name, parts, made_by, data=summary)


def _drawn(settings: Sequence[Mapping[str, Any]], expected: Sequence[str]) -> list[str]:
    """Over what was varied, or over the seeds if no number was."""
    if plots := sweep_plots(settings, expected):
        title = "By setting: each run, median, and the middle four fifths of the seeds"
        return [f"<h2>{title}</h2>", *plots]
    if plots := seed_plots(settings, expected):
        return ["<h2>By seed: each run, median, and the middle four fifths</h2>", *plots]
    return []


def _spreads(settings: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(setting(row['changes']) or 'as it is')}</td>"
        f"<td>{html.escape(metric)}</td>"
        + "".join(
            f"<td class=n>{number(spread[key])} {_unit(metric)}</td>"
            for key in ("min", "low", "median", "high", "max")
        )
        + "</tr>"
        for row in settings
        for metric, spread in row["metrics"].items()
    )
    head = ("setting", "metric", "least", "10 %", "median", "90 %", "most")
    return _rows("Metrics", head, rows)


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
        f"<td class=n>{number(entry['value'])}</td>"
        f"{_meaning(str(entry['name']).split()[0])}</tr>"
        for entry in result.expectations
    )
    return _rows("Expectations", ("verdict", "what", "is", "which is"), rows)


def _meanings(settings: Sequence[Mapping[str, Any]]) -> str:
    names = dict.fromkeys(name for row in settings for name in row["metrics"])
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>{_meaning(name)}</tr>"
        for name in names
        if name in MEANINGS
    )
    return _rows("What the metrics are", ("metric", "which is"), rows)


def _meaning(metric: str) -> str:
    return f"<td class=why>{html.escape(MEANINGS.get(metric, ''))}</td>"


def _measured(result: Result) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>"
        f"<td class=n>{number(value)} {_unit(name)}</td>{_meaning(name)}</tr>"
        for name, value in result.metrics.items()
    )
    return _rows("What was measured", ("what", "value", "which is"), rows)


def _unit(metric: str) -> str:
    """Behind a number; shares stand as fractions, as in scenarios."""
    unit = unit_of(metric)
    return "" if unit == "%" else unit


def _table(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td class=n>{number(value)}</td></tr>"
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
