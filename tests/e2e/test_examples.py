"""Each program in examples/ runs as examples/README.md says, and that of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import lines_until

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
ENV = os.environ | {"PYTHONPATH": str(ROOT)}


def play(*argv: str, cwd: Path = EXAMPLES) -> str:
    done = subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=ENV, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("chat", "chat.py"),
        ("file-drop", "drop.py"),
        ("pubsub", "topic.py"),
        ("pubsub", "topic.mjs"),
        ("simulate", "rumour.py"),
    ],
)
def test_a_program_that_a_page_shows_is_the_one_in_the_folder(page: str, file: str) -> None:
    text = (ROOT / "docs" / "cookbook" / f"{page}.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- file: {file} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert found is not None
    assert found.group(1) == (EXAMPLES / file).read_text(encoding="utf-8")


def test_the_embedding_example_of_the_readme_echoes(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    said = play("-W", "error", "-c", example, cwd=tmp_path)
    assert re.fullmatch(r"hello from 12D3Koo\w+\n", said)


def test_a_cheats_arrays_are_told_from_honest_ones() -> None:
    lines = play("prove.py").splitlines()
    found = {line[:14].strip(): [int(n) for n in re.findall(r"\d+", line)] for line in lines}
    assert found["honest"] == [0, 0]
    assert all(number > 50 for number in found["another model"])
    assert found["another seed"][0] == 0 < found["another seed"][1]
    assert found["altered token"][1] > 0
    assert lines[-1].startswith("half a proof")
    assert "no proof" in lines[-1]


def test_a_file_is_handed_over_whole(tmp_path: Path) -> None:
    source, target = tmp_path / "a.bin", tmp_path / "b.bin"
    source.write_bytes(bytes(range(256)) * 4096)
    giver = subprocess.Popen(
        [sys.executable, "drop.py", "give", str(source)],
        cwd=EXAMPLES, env=ENV, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        address = lines_until(giver, "python drop.py take")[0].split()[3]
        assert "1,048,576 bytes" in play("drop.py", "take", address, str(target))
        assert target.read_bytes() == source.read_bytes()
    finally:
        giver.kill()
        giver.communicate()


def test_a_scenario_of_ones_own_meets_its_expectations() -> None:
    said = play("-m", "sim", "run", "ring.toml", "--seed", "1", cwd=EXAMPLES / "ring")
    assert said.count("met  ") == 2


def test_the_list_of_examples_names_each() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    here = {path.name for path in EXAMPLES.iterdir() if path.name != "README.md"}
    assert {name for name in here if not name.startswith("__")} == set(
        re.findall(r"^\| `([\w.]+)/?`", text, re.MULTILINE)
    )
