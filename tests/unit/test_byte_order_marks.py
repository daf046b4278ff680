"""A byte order mark, which some editors put before a text, is no part of it: for any reader of
a person's files."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from p2p.node.tables import load_toml
from roles.diloco.corpus import _documents
from roles.envs.questions import ExactEnvironment
from roles.models.files import json_object_untrusted
from sim.cli import _baseline, _load_plan
from sim.faults.churn import read_sessions
from sim.run.scenario import load_scenario

ROOT = Path(__file__).parent.parent.parent
QUESTIONS = "".join(
    json.dumps({"question": f"{number}?", "answer": f"{number}"}) + "\n" for number in range(60)
)
PLAN = {"faults": [], "scenario": "churn", "nodes": 4, "seed": 1}
RESULT = {"metrics": {}, "level": 1, "trace_hash": ""}
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a.toml": ("a = 1\n", load_toml),
    "s.toml": (
        (ROOT / "sim/scenarios/churn.toml").read_text(),
        lambda p: load_scenario(str(p)),
    ),
    "plan.json": (json.dumps(PLAN), _load_plan),
    "result.json": (json.dumps(RESULT), _baseline),
    "churn.csv": ("node,start,end\na,0,5\n", read_sessions),
    "text.jsonl": (json.dumps({"text": "one"}), lambda path: list(_documents("c", path))),
    "text.txt": ("one", lambda path: list(_documents("c", path))),
    "questions.jsonl": (QUESTIONS, lambda p: vars(ExactEnvironment(p.read_bytes()))),
    "config.json": ('{"a": 1}', lambda path: json_object_untrusted(path.read_bytes())),
}


@pytest.mark.parametrize("name", READERS)
def test_a_mark_changes_nothing(name: str, tmp_path: Path) -> None:
    text, read = READERS[name]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    plain = read(path)
    path.write_text(text, encoding="utf-8-sig")
    assert read(path) == plain


def test_no_text_of_a_person_is_read_with_its_mark() -> None:
    """Files of this machine (``/proc``) and our own are read otherwise, and named here."""
    own = {
        "p2p/node/folders.py", "p2p/sandbox/installation.py", "roles/own/report.py",
        "sim/studies/lab/machines.py",
    }  # fmt: skip
    for package in ("p2p", "roles", "sim"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Call(func=ast.Attribute(attr="read_text"), keywords=[*words]):
                        kinds = {ast.unparse(one.value) for one in words}
                        is_ours = path.relative_to(ROOT).as_posix() in own
                        assert is_ours or "'utf-8'" not in kinds, path
