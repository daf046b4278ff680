"""What a command finds around it is answered with a sentence, by every command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.forked import COMMANDS, Forks, Surroundings, forks
from tests.sweeps import swept

NAME = "naïve 名.bin"  # what ASCII cannot encode
LINES: dict[str, list[list[str]]] = {
    "node": [["--role", "名"], ["--config", "名"]],
    "key": [["k/名"], ["/proc/nothing"]],
    "calibrate": [["--run", "名"]],
    "chat": [["名"]],
    "sample": [["名", "--prompt", "名"]],
    "sft": [["名", "--data", "名", "-o", "名"]],
    "eval": [["名"], ["名", "--env", "名"]],
    "doctor": [["--run", "名"]],
    "ledger": [["show", "名"], ["audit", "名"]],
    "demo": [["--data", "/proc/名"], ["--report", "/名/名"]],
    "run": [["show", "名"], ["init", "/proc/名"], ["start", "名"]],
    "models": [["inspect", "名"], ["fetch", "名"]],
    "sim": [["list"], ["run", "名"], ["run", "churn", "--nodes", "4", "--duration", "1"]],
    "status": [["--data", "名"]],
    "peers": [["--data", "名"]],
    "top": [["--data", "名"]],
    "pause": [["名"]],
    "resume": [["名"]],
    "push": [["名"], [f"files/{NAME}", "--data", "/proc/名"]],
    "pull": [["名"], ["shoal1名"], ["http://名", "--out", "/proc/名"]],
    "serve": [["名"]],
    "envs": [["check", "名"], ["check", "math", "名"], ["check", "sort", "--tasks", "2"]],
    "rl": [["filter", "名"], ["filter", "名", "--env", "math=名", "--out", "名"]],
    "inspect": [["名"], ["files"], [f"files/{NAME}", "--json"]],
}
AT_HOME: dict[str, list[str]] = {
    "node": [], "key": ["~/k"], "ledger": ["show"], "doctor": [], "status": [], "peers": [],
    "top": [], "pause": [], "resume": [], "push": [f"files/{NAME}"],
    "serve": [f"files/{NAME}"], "inspect": ["~/x"], "models": ["fetch", "smollm2"],
    "run": ["start", "~/x"],
}  # fmt: skip
"""Lines that use the home folder."""
HOMELESS = Surroundings(env={"HOME": None, "XDG_STATE_HOME": None, "XDG_CACHE_HOME": None})
AROUND = {
    "output unread": Surroundings(out="unread"),
    "output closed": Surroundings(out="closed"),
    "output full": Surroundings(out="/dev/full"),
    "complaints unread": Surroundings(err="unread"),
    "complaints closed": Surroundings(out="closed", err="closed"),
    "no home": HOMELESS,
    "no working directory": Surroundings(is_gone=True),
}


@pytest.fixture(scope="module")
def ascii_only() -> Iterator[Forks]:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with forks({**plain, "PYTHONIOENCODING": "ascii"}) as found:
        yield found


def folder_in(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    (folder / "files").mkdir(parents=True, exist_ok=True)
    (folder / "files" / NAME).write_bytes(b"x")
    return folder


def check(said: tuple[int, str, str], *line: object) -> None:
    code, _, complaints = said
    assert "Traceback" not in complaints, (line, complaints)
    assert "Exception ignored" not in complaints, (line, complaints)
    assert code in {0, 1, 2, 141}, (line, said)


def test_every_command_has_its_lines() -> None:
    assert set(LINES) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_surroundings_are_a_traceback(command: str, shells: Forks, tmp_path: Path) -> None:
    for number, (name, around) in enumerate(AROUND.items()):
        lines = [["--help"], *LINES[command]]
        for line in swept(LINES[command], 1) if number else lines:
            said = shells.run([command, *line], folder_in(tmp_path), around)
            check(said, command, *line, name)


@pytest.mark.parametrize("command", COMMANDS)
def test_names_that_the_output_cannot_encode_are_escaped(
    command: str, ascii_only: Forks, tmp_path: Path
) -> None:
    for line in LINES[command]:
        check(ascii_only.run([command, *line], folder_in(tmp_path), Surroundings()), line)
    if command == "inspect":
        code, _, said = ascii_only.run(["inspect", "files"], tmp_path / "here", Surroundings())
        assert (code, said.count("\n")) == (1, 1), said


@pytest.mark.parametrize("command", AT_HOME)
def test_without_a_home_folder_a_sentence_says_so(
    command: str, shells: Forks, tmp_path: Path
) -> None:
    line = [command, *AT_HOME[command]]
    code, _, complaints = shells.run(line, folder_in(tmp_path), HOMELESS)
    assert (code, complaints.count("\n")) == (2, 1), complaints
    assert "no home folder" in complaints
    assert "set HOME" in complaints


def test_a_reader_that_has_gone_ends_what_only_prints(shells: Forks, tmp_path: Path) -> None:
    for line in (["--help"], ["sim", "list"], ["inspect", "files"], ["--version"]):
        said = shells.run(line, folder_in(tmp_path), Surroundings(out="unread"))
        assert said == (141, "", ""), line


def test_a_full_output_is_a_failure(shells: Forks, tmp_path: Path) -> None:
    for line in (["--help"], ["sim", "list"], ["inspect", "files"]):
        code, _, said = shells.run(line, folder_in(tmp_path), Surroundings(out="/dev/full"))
        sentence = "error: the output cannot be written: No space left on device\n"
        assert (code, said) == (1, sentence)
