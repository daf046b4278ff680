"""Each folder opens with a map of its files, and each chosen number says why it was chosen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("p2p", "roles", "proofs", "sim")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
FOLDERS = sorted(path.parent for path in SOURCES if path.name == "__init__.py")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_number(node: ast.expr | None) -> bool:
    """A number that its author chose: literals and arithmetic, no names of other constants
    alone."""
    allowed = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Name, ast.operator, ast.unaryop)
    parts = (
        [part for part in ast.walk(node) if not isinstance(part, ast.expr_context)]
        if node
        else []
    )
    literals = [part.value for part in parts if isinstance(part, ast.Constant)]
    return (
        all(isinstance(part, allowed) for part in parts)
        and any(type(value) in (int, float) for value in literals)
        and literals not in ([0], [0.0], [1], [1.0])
    )


def chosen_numbers(
    body: list[ast.stmt], *, are_fields: bool = False
) -> Iterator[tuple[str, int]]:
    """Public constants of a module, and defaults of its dataclasses; each with its place."""
    for place, node in enumerate(body):
        match node:
            case ast.ClassDef(decorator_list=decorators, body=inner):
                if any("dataclass" in ast.unparse(one) for one in decorators):
                    for name, within in chosen_numbers(inner, are_fields=True):
                        if not is_explained(inner, within):
                            yield f"{node.name}.{name}", -1
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                is_constant = name.isupper() and not name.startswith("_") and name != "KIND"
                if (is_constant or are_fields) and name != "KIND" and is_number(value):
                    yield name, place


def is_explained(body: list[ast.stmt], place: int) -> bool:
    """Whether a docstring follows; where several stand in a row, the last one's is for all."""
    while place + 1 < len(body) and isinstance(body[place + 1], ast.AnnAssign):
        place += 1
    following = body[place + 1] if place + 1 < len(body) else None
    return (
        isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
        and isinstance(following.value.value, str)
    )


def test_a_number_that_was_chosen_says_why() -> None:
    """What it does and why, in the docstring behind it or the comment before it."""
    assert [f"{relative(path)}:{name}" for path in SOURCES for name in silent_in(path)] == []


def silent_in(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    body = TREES[path].body
    return [
        name
        for name, place in chosen_numbers(body)
        if place < 0
        or not (
            is_explained(body, place)
            or lines[body[place].lineno - 2].startswith("#")
            or "#" in lines[body[place].lineno - 1]
        )
    ]


def test_a_folder_opens_with_a_map_that_names_its_files() -> None:
    """A file by its stem or its full name; what `errors` holds is plain without a map."""
    assert {relative(one): gone for one in FOLDERS if (gone := missing_in(one))} == {}


def missing_in(folder: Path) -> list[str]:
    text = ast.get_docstring(TREES[folder / "__init__.py"]) or ""
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
    maps = [ast.get_docstring(TREES[folder / "__init__.py"]) or "" for folder in FOLDERS]
    dotted = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`")
    named = [name for text in maps for name in dotted.findall(text)]
    assert named
    assert [name for name in named if not leads_somewhere(name)] == []


def leads_somewhere(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file in TREES:
            rest = parts[end:]
            return not rest or re.search(rf"\b{rest[0]}\b", file.read_text("utf-8")) is not None
    return False
