"""The names of events in the log, from the code: ``python -m tests.events --write``."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

from p2p.node.process import EVENT

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "events.md"
LEVELS = ("error", "warning", "info", "debug", "exception")
HEAD = """# Events in the log

With `--log-format json` each line of `DIR/log` is an object: `time` (UTC), `level`, `logger`,
`message`, and, where the message begins with a name of this table, `event` and `fields`
(`name=value` of the message). `python -m tests.events --write` renews the table.

| level | events |
|---|---|
"""


@cache
def nodes(package: str) -> list[ast.ClassDef | ast.Call]:
    """The classes and the calls in a package."""
    return [
        node
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.Call)
    ]


@cache
def events() -> list[tuple[str, str]]:
    """Name and level of each message that has a name."""
    found = []
    for node in nodes("p2p") + nodes("roles"):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="logger"), attr=level),
                args=[ast.Constant(value=str(text)), *_],
            ) if level in LEVELS and (name := EVENT.match(text)):
                found.append((name[0], level.replace("exception", "error")))
    return found


def table() -> str:
    """The whole page."""
    names = {level: sorted({name for name, of in events() if of == level}) for level in LEVELS}
    return HEAD + "".join(
        f"| {level} | {', '.join(f'`{name}`' for name in found)} |\n"
        for level, found in names.items()
        if found
    )


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    TABLE.write_text(table(), encoding="utf-8")
