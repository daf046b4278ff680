"""How the packages read: prose names who acts, a name is one thing, modules say what they are.

What tests say is not measured here; reviewers read it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("p2p", "roles", "proofs", "sim")
SOURCES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
TEXTS = sorted(
    path
    for name in PACKAGES
    for path in (ROOT / name).rglob("*")
    if path.suffix in {".py", ".toml", ".md"}
)
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = sorted(path.parent for path in SOURCES if path.name == "__init__.py")

VAGUE = re.compile(r"\b(whoever|somebody|nobody|everybody|anybody)\b", re.IGNORECASE)
MOST_VAGUE = 9
"""Lines in all, of some 55,000: a sentence may need one now and then. trio, our model for
prose, has three. There were 267 before each was rewritten with the actor's name.
"""

OURS = re.compile(
    r"\b(graves?|rumou?rs?|manners|ripens?|unsaid|skippers?|say_at|beaten"
    r"|bends?|bent|repace|tales?|streets?|siege|theatre)\b",
    re.IGNORECASE,
)
"""Words that only this project used. The field's stand in their place: `Suspect`, `Tombstone`,
`Dissemination`, `PeerScores`, metrics, machines.
"""

MESSAGE_MODULES = {"events", "effects", "messages"}
"""Sibling protocols have a `Tick`, a `Received`, a `Hello` each. In modules of these names a
class may be called as one elsewhere: what imports it says which protocol it speaks.
"""

BAGS = {"Bench", "_Desk"}
"""Objects that carried what a role needed from method to method; a role's session owns it."""

MAY_REMEMBER_CLOSED = {
    "p2p/transport/": "trio's streams and listeners raise ClosedResourceError once closed",
    "sim/": "stands for the operating system's sockets, which know that they are closed",
}
"""Where an object may hold a flag for its end. All others live in a scope and are not called
after its block.
"""


LEVEL = re.compile(r" \(L\d( to L\d)?\)$")
"""A workload's first line ends with the levels of the simulator on which it runs."""
NEXT_SENTENCE = re.compile(r"[.?!] +[A-Z`]")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines_with(words: re.Pattern[str], texts: Iterable[Path] = TEXTS) -> list[str]:
    return [
        f"{relative(path)}:{number} {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if words.search(line)
    ]


def classes() -> Iterator[tuple[Path, str]]:
    """Every class of the packages, also those that are made in functions."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node.name


def attributes(tree: ast.AST) -> Iterator[str]:
    """The names that objects have in a module: read, written, or declared in a class."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.ClassDef(body=body):
                for statement in body:
                    match statement:
                        case ast.AnnAssign(target=ast.Name(id=name)):
                            yield name
                        case ast.Assign(targets=targets):
                            yield from (t.id for t in targets if isinstance(t, ast.Name))


def test_prose_names_who_acts() -> None:
    found = lines_with(VAGUE, [*TEXTS, *DOCS])
    assert len(found) <= MOST_VAGUE, found


def test_the_fields_words_stand_in_place_of_ours() -> None:
    assert lines_with(OURS) == []


def test_no_two_classes_have_one_name() -> None:
    """Once outside the modules of events and messages, and there as often as there are
    protocols: but in one module once.
    """
    outside = Counter(name for path, name in classes() if path.stem not in MESSAGE_MODULES)
    per_module = Counter(classes())
    assert [name for name, count in outside.items() if count > 1] == []
    assert [f"{relative(path)} {name}" for (path, name), n in per_module.items() if n > 1] == []


def test_no_class_is_a_bag() -> None:
    assert [f"{relative(path)} {name}" for path, name in classes() if name in BAGS] == []


def test_shardcast_needs_no_exemption_from_types() -> None:
    sources = sorted((ROOT / "p2p" / "shardcast").rglob("*.py"))
    assert sources
    assert [relative(p) for p in sources if "type: ignore" in p.read_text("utf-8")] == []


def test_scopes_end_things_and_no_flag_does() -> None:
    found = {relative(path) for path, tree in TREES.items() if "_closed" in attributes(tree)}
    unexplained = [name for name in found if not name.startswith(tuple(MAY_REMEMBER_CLOSED))]
    assert sorted(unexplained) == []
    for folder in MAY_REMEMBER_CLOSED:
        assert any(name.startswith(folder) for name in found), f"{folder} needs no exception"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_module_says_what_it_is_in_one_sentence_on_one_line(path: Path) -> None:
    text = ast.get_docstring(TREES[path])
    assert text, "a module opens with a docstring"
    first, *rest = text.split("\n\n", 1)[0].splitlines()
    assert rest == [], "the first sentence fits in one line, and a blank line follows"
    sentence = LEVEL.sub("", first)
    assert sentence.endswith((".", "?"))
    assert not NEXT_SENTENCE.search(sentence), "what else there is to say follows below"


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


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_a_number_that_was_chosen_says_why(path: Path) -> None:
    """Issue 11.9: what it does and why, in the docstring behind it or the comment before it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    body = TREES[path].body
    silent = [
        name
        for name, place in chosen_numbers(body)
        if place < 0
        or not (
            is_explained(body, place)
            or lines[body[place].lineno - 2].startswith("#")
            or "#" in lines[body[place].lineno - 1]
        )
    ]
    assert silent == []


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_a_folder_opens_with_a_map_that_names_its_files(folder: Path) -> None:
    """A file by its stem or its full name; what `errors` holds is plain without a map."""
    text = ast.get_docstring(TREES[folder / "__init__.py"]) or ""
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__", "errors"}
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    package = ".".join(folder.relative_to(ROOT).parts)
    missing = [
        name
        for name in sorted(files | folders)
        if f"`{name}`" not in text and f"`{package}.{name}`" not in text
    ]
    assert missing == []


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_a_map_names_nothing_that_is_gone(folder: Path) -> None:
    """A dotted name of ours in a map leads to a module, or to something that a module has."""
    text = ast.get_docstring(TREES[folder / "__init__.py"]) or ""
    named = re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`", text)
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
