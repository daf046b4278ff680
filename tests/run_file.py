"""Keys of run files but those of a recipe: ``python -m tests.run_file --write``."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "run-file.md"
HEAD: Final = """# Run file: every key

[Runs](runs.md) says how run files are made and changed; `[sampling]` and `[diloco]` are in
[recipe](recipe.md). `python -m tests.run_file --write` makes this page from the dataclasses.
"""
TABLES: Final = (
    ("Top level", "roles/contract/core/file.py", "Terms"),
    ("`[admission]`", "roles/contract/core/file.py", "AdmissionRules"),
    ("`[model]`", "roles/contract/core/file.py", "Model"),
    ("`[model.shape]`", "roles/contract/core/shape.py", "ModelShape"),
    ("`[[environments]]`", "roles/contract/core/file.py", "EnvironmentPin"),
    ("`[limits]`", "proofs/checks.py", "Limits"),
    ("`[trust]`", "roles/contract/core/trust.py", "TrustTerms"),
    ("`[delivery]`", "roles/contract/core/file.py", "Delivery"),
)


def fields(file: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Key, default and first sentence of each field of a dataclass."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    (body,) = (
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
    )
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            text = re.split(r"(?<=[.!?])\s", " ".join(str(after.value.value).split()))[0]
            text = text.replace("``", "`")
        yield node.target.id, plain(node.value, module), text


def plain(value: ast.expr | None, module: ModuleType) -> str:
    """A default as TOML would write it; empty for tables and for what must be given."""
    match value:
        case ast.Attribute(attr=name):
            return name.lower()
        case ast.Constant(value=None) | ast.Call() | None:
            return ""
        case ast.Name(id=name):
            return str(getattr(module, name))
        case ast.Tuple(elts=elements):
            return f"[{', '.join(plain(one, module) for one in elements)}]"
    return ast.unparse(value).strip("'").replace("True", "true").replace("False", "false")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, file, name in TABLES:
        parts.append(f"\n## {title}\n\n| key | default | meaning |\n")
        parts.append("|---|---|---|\n")
        for key, default, text in fields(file, name):
            parts.append(f"| `{key}` | {f'`{default}`' if default else ''} | {text} |\n")
    return "".join(parts)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    PAGE.write_text(page(), encoding="utf-8")
