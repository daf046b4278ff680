"""Errors and their remedies, in docs/errors.md: ``python -m tests.errors --write``.

What is raised and logged comes from the code. The last column is written by hand, in the page,
and is kept; a row that the code has gained is written without one, and a test fails until it
has.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.events import events

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "errors.md"
ROOTS: Final = ("ShoalError", "SimulationError")
LOUD: Final = ("warning", "error")
ROW: Final = re.compile(r"^\| `([\w.]+)` \|.*\| (.*?) \|$", re.MULTILINE)
HEAD: Final = """# Errors and remedies

A command that fails prints one sentence and ends: exit code 1 if something went wrong, 2 if the
command line or a file that it names is wrong. The sentence names the file, the key or the
option, and mostly the remedy, so this page does not repeat the sentences. `shoal doctor` finds
most causes before they cost anything.

`python -m tests.errors --write` renews the two tables from the code; a test fails where a
remedy is missing.

## Errors

Who embeds Shoal catches these; a node prints them. All are `p2p.ShoalError`s except those of
the simulator.

| error | it means | what to do |
|---|---|---|
"""
MIDDLE: Final = """
## Warnings and errors in the log

`DIR/log` of a node. All events, those of lower levels too, are in `docs/events.md`.

| event | level | what to do |
|---|---|---|
"""


def classes() -> Iterator[tuple[str, str]]:
    """Name and first sentence of each public error that an operator or an embedder meets."""
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    for package in ("p2p", "roles", "sim"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    bases = tuple(base.id for base in node.bases if isinstance(base, ast.Name))
                    text = " ".join((ast.get_docstring(node) or "").split())
                    found[node.name] = bases, re.split(r"(?<=[.!?])\s", text)[0]

    def is_ours(name: str) -> bool:
        return name in ROOTS or any(map(is_ours, found.get(name, ((), ""))[0]))

    for name, (_, text) in found.items():
        if is_ours(name) and not name.startswith("_"):
            yield name, text


def remedies() -> dict[str, str]:
    """What the page says of each error and event."""
    return dict(ROW.findall(PAGE.read_text(encoding="utf-8"))) if PAGE.exists() else {}


def page() -> str:
    """The whole page, with the remedies that it has now."""
    known = remedies()
    loud = sorted({(name, level) for name, level, *_ in events() if level in LOUD})

    def rows(found: Iterable[tuple[str, str]]) -> str:
        return "".join(f"| `{name}` | {of} | {known.get(name, '')} |\n" for name, of in found)

    return HEAD + rows(classes()) + MIDDLE + rows(loud)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    PAGE.write_text(page(), encoding="utf-8")
