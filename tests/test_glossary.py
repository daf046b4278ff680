"""docs/glossary.md is complete: what a package exports, what a core is made of, and what one
folder lends another has a row; and what a row names is there.

A class that only its own folder uses is explained where it stands. Messages and events are
explained in docs/protocols. Scenarios (`sim.workloads`, `sim.lab`) and the demo's model
(`roles.engines.torch`) are uses of what the glossary explains.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
PACKAGES = ("p2p", "roles", "proofs", "sim")
TABLES = frozenset({"events", "effects", "messages", "errors"})
"""Modules that are tables of classes with one line each. What of them is exported has a row all
the same."""
USES = ("sim.workloads", "sim.lab", "roles.engines.torch")
COLUMNS = 4


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the four packages by its dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): (
            ast.parse(path.read_text(encoding="utf-8"))
        )
        for top in PACKAGES
        for path in sorted((ROOT / top).rglob("*.py"))
    }


def defined(tree: ast.Module) -> Iterator[str]:
    """The names that a module itself gives a meaning."""
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name


def public_classes(tree: ast.Module) -> set[str]:
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each name that a module imports, also for types or late, with where it comes from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def definition(module: str, name: str) -> str:
    """Where a name that ``module`` offers is defined: through all packages that pass it on."""
    tree = modules()[module]
    if name not in set(defined(tree)):
        for source, imported in imports(tree):
            if imported == name and source in modules():
                return definition(source, name)
    return f"{module}:{name}"


def folder(module: str) -> str:
    """The package that a module is in; it is its own if it has an ``__init__``."""
    inside = (ROOT / module.replace(".", "/")).is_dir()
    return module if inside else module.rpartition(".")[0]


def explained_elsewhere(module: str) -> bool:
    return module.rpartition(".")[2] in TABLES or module.startswith(USES)


def exported() -> set[str]:
    """What is in the ``__all__`` of a package."""
    return {
        definition(module, element.value)
        for module, tree in modules().items()
        if folder(module) == module
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "__all__"
        and isinstance(node.value, ast.List)
        for element in node.value.elts
        if isinstance(element, ast.Constant) and isinstance(element.value, str)
    }


def parts_of_cores() -> set[str]:
    return {
        f"{module}:{name}"
        for module, tree in modules().items()
        if ".core." in module and not explained_elsewhere(module)
        for name in public_classes(tree)
    }


def shared() -> set[str]:
    """Classes that a folder other than their own imports."""
    return {
        f"{source}:{name}"
        for module, tree in modules().items()
        for source, name in imports(tree)
        if source in modules()
        and folder(source) != folder(module)
        and not explained_elsewhere(source)
        and name in public_classes(modules()[source])
    }


@cache
def rows() -> list[list[str]]:
    """The cells of every row, without heads and rules."""
    lines = GLOSSARY.read_text(encoding="utf-8").splitlines()
    cells = [
        [c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return [row for row in cells if row[0] != "term" and not row[0].startswith("---")]


def places(cell: str) -> Iterator[str]:
    """The definitions that the last cell of a row names; ``:Name`` repeats the module."""
    module = ""
    for place in cell.split(", "):
        found = re.fullmatch(r"`([\w.]*):(\w+)`", place)
        assert found, f"not `module:Name` or `:Name`: {place}"
        module = found[1] or module
        yield f"{module}:{found[2]}"


def all_places() -> list[str]:
    return list(chain.from_iterable(places(row[-1]) for row in rows()))


def test_every_row_has_its_four_cells() -> None:
    assert rows()
    assert not [row for row in rows() if len(row) != COLUMNS or not all(row)]


def test_what_the_glossary_names_is_defined_there() -> None:
    missing = [
        place
        for place in all_places()
        for module, name in [place.split(":")]
        if module not in modules() or name not in set(defined(modules()[module]))
    ]
    assert not missing


def test_no_term_and_no_definition_stands_twice() -> None:
    terms = Counter(term for row in rows() for term in row[0].split(", "))
    assert not [term for term, times in terms.items() if times > 1]
    assert not [place for place, times in Counter(all_places()).items() if times > 1]


def test_a_name_in_the_first_column_is_one_of_the_definitions() -> None:
    strange = [
        (term, row[-1])
        for row in rows()
        for term in re.findall(r"`(\w+)`", row[0])
        if term not in {place.partition(":")[2] for place in places(row[-1])}
    ]
    assert not strange, "renamed in the code, or misspelt here"


def test_what_is_exported_is_explained() -> None:
    assert exported()
    assert not sorted(exported() - set(all_places()))


def test_what_a_core_is_made_of_is_explained() -> None:
    assert parts_of_cores()
    assert not sorted(parts_of_cores() - set(all_places()))


def test_what_one_folder_lends_another_is_explained() -> None:
    assert shared()
    assert not sorted(shared() - set(all_places()))
