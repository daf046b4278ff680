"""A run of one's own, from nothing: what `shoal run init` makes, and what playing it does.

Commands run in this process, but for nodes and for what Ctrl-C ends.
"""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p.machine import load_or_create_key
from p2p.node.cli import key_main
from p2p.node.process import locked_folder
from p2p.node.rundoc import HELD, PATH
from roles.contract import Run, decode_run_untrusted
from roles.contract.core.file import sign_run
from roles.own.__main__ import main as run_main
from roles.own.draft import Plan, Source, write_draft
from roles.own.init import start_lines
from roles.own.layout import RunFolder
from roles.protocol.model_files import FOLDER
from roles.rl.recipes import NETWORK, SMALL_MODEL
from tests.e2e.node_process import LOOPBACK, fail, node
from tests.model_folders import make_folder
from tests.support.processes import lines_until, started
from tests.support.runs import OWNER, RUN, TERMS

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
QUESTIONS = EXAMPLES / "questions" / "questions.jsonl"
THEIRS = sign_run(replace(TERMS, name="theirs"), OWNER)
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWCKCeqLPSgMnDjyFsJuWqREDtKNHx1JEBiwaMXhCLNTRb"


def init(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and all output of ``shoal run init``."""
    code = run_main(["init", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out + said.err


def run_in(folder: Path) -> Run:
    return decode_run_untrusted((folder / "run.shoal").read_bytes())


@pytest.fixture
def smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model where `shoal models fetch smollm2` puts that one, with what it puts
    beside."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "cache" / "shoal" / "models" / "smollm2-135m-instruct"
    folder = make_folder(place, context=1024)
    (folder / "LICENSE").write_text("of the model")
    (folder / "README.md").write_text("about the model")
    return folder


def test_a_key_is_made_once_and_its_id_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It took two starts of a node and two Ctrl-Cs to learn the ids that a draft names."""
    said = []
    for _ in range(2):
        assert key_main([str(tmp_path / "trainer")]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == f"{load_or_create_key(tmp_path / 'trainer/key').peer_id}\n"
    assert (tmp_path / "trainer" / "key").stat().st_mode & 0o777 == 0o600


def test_init_makes_keys_draft_and_signed_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    code, said = init(capsys, folder, "--nodes", "3")
    assert code == 0
    run = run_in(folder)
    peers = {name: load_or_create_key(folder / name / "key").peer_id for name in
             ("trainer", "validator", "inference-1", "inference-2", "inference-3")}  # fmt: skip
    assert run.name == "mine"
    assert run.owner == load_or_create_key(folder / "owner.key").peer_id
    assert run.terms.trainers == (peers["trainer"],)
    assert run.terms.validators == (peers["validator"],)
    assert run.terms.sampling == NETWORK.sampling
    assert RunFolder(folder).cast() == {
        "trainer": "trainer", "validator": "validator", "inference-1": "inference",
        "inference-2": "inference", "inference-3": "inference",
    }  # fmt: skip
    lines = [line for line in said.splitlines() if line.startswith("shoal node --role ")]
    assert len(lines) == 5
    assert "--run" in lines[0]
    port = lines[0].rpartition("/tcp/")[2]
    assert all(line.endswith(f"/tcp/{port}/p2p/{peers['trainer']}") for line in lines[1:])
    with socket.socket() as other:  # another run on this machine
        other.bind(("0.0.0.0", int(port)))
        other.listen(1)
        assert f"/tcp/{port}" not in "".join(start_lines(RunFolder(folder), run))
    before = (folder / "run.shoal").read_bytes()
    code, said = init(capsys, folder)
    assert (code, "holds a run already: start it with shoal run start" in said) == (2, True)
    assert (folder / "run.shoal").read_bytes() == before


def test_init_takes_the_learner_beside_a_draft_if_it_suits_the_model(
    tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the sorting network's rate SmolLM2 went from 6 % to 6 %, and nobody warned."""
    shutil.copytree(EXAMPLES / "arithmetic", tmp_path / "theirs")
    draft, beside = tmp_path / "theirs" / "draft.toml", tmp_path / "theirs" / "learner.toml"
    draft.write_text(re.sub(r"end_tokens = .*", "", draft.read_text()))
    beside.write_text("rate = 8e-4\n")
    folder = tmp_path / "mine"
    code, said = init(capsys, folder, "--draft", draft)
    assert (code, "rate = 0.0008 in learner.toml would ruin a small language" in said) == (
        2,
        True,
    )
    assert not (folder / "run.shoal").exists()
    beside.write_text("# mine\nrate = 5e-5\n")
    assert init(capsys, folder, "--draft", draft)[0] == 0
    assert (folder / "trainer" / "learner.toml").read_text() == "# mine\nrate = 5e-5\n"


def test_a_models_own_files_go_to_the_trainer_and_no_others(
    tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer refused LICENSE, then README.md, one file a start: `shoal models fetch`
    writes both."""
    folder = tmp_path / "mine"
    assert init(capsys, folder, "--model", "smollm2")[0] == 0
    run = run_in(folder)
    pinned = {pin.name for pin in run.terms.model.base}
    assert {path.name for path in (folder / "trainer" / FOLDER).iterdir()} == pinned
    assert not pinned & {"LICENSE", "README.md"}
    assert run.terms.sampling == SMALL_MODEL.sampling
    assert run.terms.environments[0].kinds["addition"] == 6.0
    assert len(run.terms.model.end_tokens) > 1, "a newline ends an answer of one line"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--env", "arithmetic"], "arithmetic asks in words, which needs a model that reads"),
        (["--env", "arithmetik"], "there is no environment 'arithmetik'"),
        (["--model", "smollm2", "--env", "sort"], "sort is for the network that is drawn"),
        (["--model", "nowhere"], "there is no such folder"),
        (["--model", "smollm2", "--env", "arithmetik"], "arithmetik"),
        (["--model", "smollm2", "--env", "math-exact=no.jsonl"], "no.jsonl cannot be read"),
        (["--draft", "x.toml", "--env", "sort"], "give the one or the others"),
        (["--draft", "nowhere.toml"], "nowhere.toml cannot be read"),
    ],
)
def test_what_makes_no_sense_is_one_sentence_and_no_run(
    arguments: Sequence[str], sentence: str, tmp_path: Path, smollm2: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    code, said = init(capsys, tmp_path / "mine", *arguments)
    assert code == 2
    assert said.startswith("error: ")
    assert sentence in said
    assert said.count("\n") == 1
    assert not (tmp_path / "mine" / "run.shoal").exists()


# The examples


def draft_of(example: str) -> dict[str, Any]:
    return tomllib.loads((EXAMPLES / example / "draft.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("example", "plan"),
    [
        ("sorting", Plan("sorting")),
        ("arithmetic", Plan("arithmetic", "smollm2")),
        ("questions", Plan("questions", "smollm2", (Source("math-exact", QUESTIONS),))),
    ],
)
def test_the_drafts_of_the_examples_are_what_init_writes(
    example: str, plan: Plan, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tomllib.loads(write_draft(plan))
    found = draft_of(example)
    for table in (written, found):  # end tokens are the model's, and here it is another
        table["model"].pop("end_tokens")
        for environment in table["environments"]:
            environment.pop("data", None)
    if example == "questions":
        assert "right ones have 3 characters at most" in capsys.readouterr().err
        for key in ("temperature", "max_new_tokens"):  # of its own questions
            found["sampling"].pop(key)
            written["sampling"].pop(key)
    assert found == written


@pytest.mark.parametrize("example", ["arithmetic", "questions"])
def test_the_draft_of_an_example_makes_a_run(
    example: str, tmp_path: Path, smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / example / "draft.toml").read_text(encoding="utf-8")
    text = re.sub(r"end_tokens = .*", "", text)  # the tiny model has others
    shutil.copytree(EXAMPLES / example, tmp_path / example)
    (tmp_path / example / "draft.toml").write_text(text, encoding="utf-8")
    folder = tmp_path / "mine"
    code, said = init(capsys, folder, "--draft", tmp_path / example / "draft.toml")
    assert code == 0, said
    (environment,) = run_in(folder).terms.environments
    if example == "questions":
        config = tomllib.loads((folder / "node.toml").read_text())
        place = Path(config["role"]["trainer"]["machine"]["environment_data"])
        assert environment.data is not None
        assert (place / environment.data.name).read_bytes() == (
            EXAMPLES / example / "questions.jsonl"
        ).read_bytes()


def commands_of(example: str) -> list[str]:
    text = (EXAMPLES / example / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^\$ shoal (.*)", text, re.MULTILINE)


@pytest.mark.deep
def test_the_sorting_example_runs_as_its_page_says(tmp_path: Path) -> None:
    """Until the first policy is there and judged; then Ctrl-C ends all nodes, and the folder
    can be played again."""
    make, play = commands_of("sorting")
    folder = tmp_path / "sorting"
    for command in (make, play):
        assert "~/sorting" in command
    arguments = [*make.replace("~/sorting", str(folder)).split(), "--nodes", "1"]
    made = subprocess.run(
        [sys.executable, "-m", "roles.own", *arguments[1:]],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert f"shoal run start {folder}" in made.stdout
    arguments = play.replace("~/sorting", str(folder)).split()
    with started("-m", "roles.own", *arguments[1:], OMP_NUM_THREADS="1") as process:
        lines = [*lines_until(process, "join from another shell"), ""]
        while not re.match(r" *\d+ s  step   0  held-out greedy 0\.\d+ ", lines[-1]):
            assert process.stdout is not None
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        assert lines[0].startswith("sorting (")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.stdout is not None
        assert "goes on" in process.stdout.read()
    for name in ("trainer", "validator", "inference-1"):
        with locked_folder(folder / name):  # no node is left that uses it
            pass
    assert (folder / "trainer" / "trainer" / "checkpoint").exists()


# A folder is of one run


@pytest.fixture
def stranger(tmp_path: Path) -> Any:
    """The address of a node that is in another run than `pinned` folders."""
    document = tmp_path / "theirs.shoal"
    document.write_bytes(THEIRS.document)
    with node(tmp_path / "stranger", "--run", str(document)) as running:
        addr = running.line()["addrs"][0]
        running.line()
        yield addr


def pinned(tmp_path: Path) -> Path:
    """A node's folder that is of the run `RUN`."""
    folder = tmp_path / "pinned"
    folder.mkdir()
    (folder / PATH).write_bytes(RUN.document)
    return folder


def test_a_folder_of_another_run_does_not_go_on_in_it_without_a_word(
    tmp_path: Path, stranger: str
) -> None:
    """One address that answered nothing was enough: the node worked for the run of its folder,
    and its person waited for it in theirs."""
    folder = pinned(tmp_path)
    where = ["--bootstrap", NOBODY, "--bootstrap", stranger]
    code, error = fail("--data", str(folder), *LOOPBACK, *where)
    assert code == 1
    assert "it is of run 'theirs'" in error
    assert "this node is pinned to 'sorting'" in error
    assert error.endswith("use another --data, or a member of that run\n")
    assert error.count("\n") == 1


def test_a_member_that_comes_later_is_asked_again(tmp_path: Path) -> None:
    """A worker that is started before the trainer met nobody, and worked for its old run."""
    folder, document = pinned(tmp_path), tmp_path / "theirs.shoal"
    document.write_bytes(THEIRS.document)
    key = load_or_create_key(tmp_path / "late" / "key")
    with node(tmp_path / "probe") as probe:
        port = probe.line()["addrs"][0].split("/")[4]
    addr = f"/ip4/127.0.0.1/tcp/{port}/p2p/{key.peer_id}"
    with node(folder, "--bootstrap", addr) as early:
        early.line()
        assert early.line()["name"] == "sorting"
        listen = ("--listen", f"/ip4/127.0.0.1/tcp/{port}")
        with node(tmp_path / "late", "--run", str(document), *listen) as late:
            late.line()
            assert early.process.wait(timeout=60) == 1
            assert early.process.stderr is not None
            assert "it is of run 'theirs'" in early.process.stderr.read()


def test_what_roles_left_of_another_run_is_refused(tmp_path: Path, stranger: str) -> None:
    """Without its run file such a folder was taken for a new one, with another run's
    checkpoint and unpaid work in it."""
    folder, document = pinned(tmp_path), tmp_path / "theirs.shoal"
    document.write_bytes(THEIRS.document)
    with node(folder) as running:
        running.line()
        running.line()
        assert running.interrupt() == 0
    assert (folder / HELD).read_text() == RUN.id.hex()
    (folder / PATH).unlink()
    for arguments in (["--run", str(document)], ["--bootstrap", stranger]):
        code, error = fail("--data", str(folder), *LOOPBACK, *arguments)
        assert code == 1
        assert f"says that this folder is of run {RUN.id.hex()[:12]}" in error
        assert error.endswith("use another --data\n")
    document.write_bytes(RUN.document)
    with node(folder, "--run", str(document)) as running:
        running.line()
        assert running.line()["run"] == RUN.id.hex()
