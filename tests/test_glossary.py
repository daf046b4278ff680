"""docs/glossary.md names only what exists: each definition that it lists is in the code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
COLUMNS = 4


def rows() -> list[list[str]]:
    """The cells of every row, without heads and rules."""
    lines = GLOSSARY.read_text(encoding="utf-8").splitlines()
    cells = [
        [c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return [row for row in cells if row[0] != "term" and not row[0].startswith("---")]


def places(cell: str) -> Iterator[tuple[str, str]]:
    """Module and name of each definition in the last cell of a row; ``:Name`` repeats the
    module."""
    module = ""
    for place in cell.split(", "):
        found = re.fullmatch(r"`([\w.]*):(\w+)`", place)
        assert found, f"not `module:Name` or `:Name`: {place}"
        module = found[1] or module
        yield module, found[2]


def defined(module: str) -> set[str]:
    """The names that a module gives a meaning; none if it is not there."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []
    names = set()
    for node in body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
    return names


def test_every_row_has_its_four_cells() -> None:
    assert rows()
    assert not [row for row in rows() if len(row) != COLUMNS or not all(row)]


def test_what_the_glossary_names_is_defined_there() -> None:
    named = [place for row in rows() for place in places(row[-1])]
    assert not [f"{module}:{name}" for module, name in named if name not in defined(module)]


def test_no_term_stands_twice() -> None:
    terms = Counter(term for row in rows() for term in row[0].split(", "))
    assert not [term for term, times in terms.items() if times > 1]
