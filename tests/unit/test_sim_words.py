"""How sim reads: it names who acts, opens each folder with a map, and calls no two classes
alike.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SIM = ROOT / "sim"
VAGUE = re.compile(r"\b(whoever|somebody|nobody|everybody|anybody)\b", re.IGNORECASE)
OURS = re.compile(r"\b(bends?|bent|repace|tales?|streets?|siege|theatre)\b", re.IGNORECASE)
"""Words that only this project used; the field's stand in their place."""
FOLDERS = sorted(path.parent for path in SIM.rglob("__init__.py"))


def class_names(top: str) -> Counter[str]:
    """Every class of a package, also those that are made in functions, and how often."""
    return Counter(
        node.name
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )


@pytest.mark.parametrize("words", [VAGUE, OURS], ids=["vague", "ours"])
def test_these_words_do_not_occur(words: re.Pattern[str]) -> None:
    texts = [*SIM.rglob("*.py"), *SIM.rglob("*.toml")]
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert not found


def test_no_class_of_sim_has_a_name_that_another_has() -> None:
    ours = class_names("sim")
    others = class_names("p2p") + class_names("roles") + class_names("proofs")
    assert [name for name, count in ours.items() if count > 1 or name in others] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_folder_opens_with_a_map_that_names_its_files(folder: Path) -> None:
    text = (
        ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    )
    files = {path.stem for path in folder.glob("*.py")} - {
        "__init__",
        "__main__",
        "cli",
        "errors",
    }
    folders = {path.parent.name for path in folder.glob("*/__init__.py")}
    assert [name for name in sorted(files | folders) if f"{name}`" not in text] == []
