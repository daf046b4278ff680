"""Errors and their remedies, in docs/errors.md: ``python -m tests.errors --write``.

What is raised and logged comes from the code. Remedies are written by hand, in the page,
and are kept; names with equal remedies share a row. A name that the code has gained is
written without one, and a test fails until it has.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.events import events, nodes

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "errors.md"
ROOTS: Final = ("ShoalError", "SimulationError")
LOUD: Final = ("warning", "error")
ROW: Final = re.compile(r"^\| (`[\w.]+`(?:, `[\w.]+`)*) \| (.*?) \|$", re.MULTILINE)
NAME: Final = re.compile(r"`([\w.]+)`")
HEAD: Final = """# Errors and remedies

A command that fails prints one sentence, which names the file, key or option and mostly the
remedy, and ends with one of the [exit codes](exit-codes.md). `shoal doctor` finds most causes
before they cost anything. `python -m tests.errors --write` renews the tables from the code.

## Errors

Who embeds Shoal catches these; a node prints them.

| error | what to do |
|---|---|
"""
MIDDLE: Final = """
## Warnings and errors in the log

`DIR/log` of a node. `docs/events.md` has all events, those of lower levels too.

| event | what to do |
|---|---|
"""
NOTHING: Final = "Nothing"
QUIET: Final = "\nThese mend themselves:"


def classes() -> Iterator[str]:
    """Name of each public error that an operator or an embedder meets."""
    found: dict[str, tuple[str, ...]] = {}
    for package in ("p2p", "roles", "sim"):
        for node in nodes(package):
            if isinstance(node, ast.ClassDef):
                bases = tuple(base.id for base in node.bases if isinstance(base, ast.Name))
                found[node.name] = bases

    def is_ours(name: str) -> bool:
        return name in ROOTS or any(map(is_ours, found.get(name, ())))

    return (name for name in found if is_ours(name) and not name.startswith("_"))


def remedies() -> dict[str, str]:
    """What the page says of each error and event."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    quiet = NAME.findall(text.partition(QUIET)[2])
    told = {name: what for names, what in ROW.findall(text) for name in NAME.findall(names)}
    return {**told, **dict.fromkeys(quiet, NOTHING)}


def page() -> str:
    """The whole page, with the remedies that it has now."""
    known = remedies()
    loud = sorted({name for name, level in events() if level in LOUD})

    def rows(names: Iterable[str]) -> str:
        alike: dict[str, list[str]] = {}
        for name in names:
            alike.setdefault(known.get(name, ""), []).append(f"`{name}`")
        alike.pop(NOTHING, None)
        return "".join(f"| {', '.join(found)} | {what} |\n" for what, found in alike.items())

    quiet = ", ".join(f"`{name}`" for name in loud if known.get(name) == NOTHING)
    tail = textwrap.fill(f"{QUIET.strip()} {quiet}.", 120)
    return HEAD + rows(classes()) + MIDDLE + rows(loud) + f"\n{tail}\n"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    PAGE.write_text(page(), encoding="utf-8")
