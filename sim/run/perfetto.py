"""A trace that ui.perfetto.dev opens: one row for each node, arrows for messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TextIO

from sim.kernel.trace import TraceEntry

_MESSAGE_FIELDS = 5
"""time, receiver, protocol, sender, checksum: see `sim.node.host.SimHost.take_message`."""


def write_perfetto(entries: Sequence[TraceEntry], out: TextIO) -> int:
    """Write Chrome's trace event format; returns how many events there are."""
    rows: dict[str, int] = {}
    count = 0
    out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for number, entry in enumerate(entries):
        for event in _events(number, entry, rows):
            out.write((",\n" if count else "") + json.dumps(event, separators=(",", ":")))
            count += 1
    for name, row in rows.items():
        meta = {"ph": "M", "name": "process_name", "pid": row, "args": {"name": name}}
        out.write((",\n" if count else "") + json.dumps(meta, separators=(",", ":")))
        count += 1
    out.write("\n]}\n")
    return count


def _events(number: int, entry: TraceEntry, rows: dict[str, int]) -> list[dict[str, Any]]:
    when, node, what, *details = entry
    assert isinstance(when, int)
    row = rows.setdefault(str(node), len(rows) + 1)
    start = when / 1000
    event = {"ph": "X", "name": str(what), "pid": row, "tid": 1, "ts": start, "dur": 1}
    if details:
        event["args"] = {"details": [_readable(item) for item in details]}
    if len(entry) != _MESSAGE_FIELDS or not str(what).startswith("/"):
        return [event]
    sender = rows.setdefault(str(details[0]), len(rows) + 1)
    arrow = {"cat": "message", "name": str(what), "id": number, "tid": 1}
    return [
        event,
        {**arrow, "ph": "s", "pid": sender, "ts": max(0.0, start - 1)},
        {**arrow, "ph": "f", "bp": "e", "pid": row, "ts": start},
    ]


def _readable(item: object) -> object:
    return item.hex() if isinstance(item, bytes) else item
