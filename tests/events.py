"""The names of events in the log, from the code: ``python -m tests.events --write``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from p2p.node.process import EVENT

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "events.md"
LEVELS = {"debug", "info", "warning", "error", "exception"}
HEAD = """# Events in the log

With `--log-format json` each line of `DIR/log` is an object: `time` (UTC), `level`, `logger`,
`message`, and, where the message begins with a name of this table, `event` and `fields`.
`python -m tests.events --write` renews the table; a test compares it.

| event | level | message |
|---|---|---|
"""


def events() -> Iterator[tuple[str, str, str]]:
    """Name, level and template of each message that has a name."""
    for package in ("p2p", "roles"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="logger"), attr=level),
                        args=[ast.Constant(value=str(text)), *_],
                    ) if level in LEVELS and (name := EVENT.match(text)):
                        yield name[0], level.replace("exception", "error"), text


def table() -> str:
    """The whole page."""
    rows = sorted(set(events()))
    return HEAD + "".join(
        f"| `{name}` | {level} | {text[len(name) :].strip(' :,') or '-'} |\n"
        for name, level, text in rows
    )


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    TABLE.write_text(table(), encoding="utf-8")
