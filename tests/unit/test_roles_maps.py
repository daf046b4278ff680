"""Each package of roles opens with a map: its first docstring names every module in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROLES = Path(__file__).parents[2] / "roles"
PACKAGES = sorted(path.parent for path in ROLES.glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_the_map_names_every_module(package: Path) -> None:
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    text = ast.get_docstring(tree) or ""
    modules = [path.stem for path in package.glob("*.py") if not path.stem.startswith("__")]
    assert modules
    assert [name for name in sorted(modules) if f"`{name}`" not in text] == []


def test_the_map_of_all_names_every_package() -> None:
    text = (
        ast.get_docstring(ast.parse((ROLES / "__init__.py").read_text(encoding="utf-8"))) or ""
    )
    assert [path.name for path in PACKAGES if f"`roles.{path.name}`" not in text] == []
