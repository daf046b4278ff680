"""Each folder opens with a map of its files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("p2p", "roles", "proofs", "sim")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
FOLDERS = sorted(path.parent for path in SOURCES if path.name == "__init__.py")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def map_of(folder: Path) -> str:
    init = (folder / "__init__.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(init)) or ""


def test_a_folder_opens_with_a_map_that_names_its_files() -> None:
    """A file by its stem or its full name; what `errors` holds is plain without a map."""
    assert {relative(one): gone for one in FOLDERS if (gone := missing_in(one))} == {}


def missing_in(folder: Path) -> list[str]:
    text = map_of(folder)
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__", "errors"}
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    package = ".".join(folder.relative_to(ROOT).parts)
    return [
        name
        for name in sorted(files | folders)
        if f"`{name}`" not in text and f"`{package}.{name}`" not in text
    ]


def test_a_map_names_nothing_that_is_gone() -> None:
    """A dotted name of ours in a map leads to a module, or to something that a module has."""
    dotted = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`")
    named = [name for folder in FOLDERS for name in dotted.findall(map_of(folder))]
    assert named
    assert [name for name in named if not leads_somewhere(name)] == []


def leads_somewhere(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file in SOURCES:
            rest = parts[end:]
            return not rest or re.search(rf"\b{rest[0]}\b", file.read_text("utf-8")) is not None
    return False
