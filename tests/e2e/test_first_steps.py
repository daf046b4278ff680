"""What a person meets who starts from the README.

Commands run as real processes where signals, pipes or missing modules matter, and in this
process elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from p2p import ConfigError, Multiaddr, PeerId, PeerUnreachable, ProtocolNotSupported, WrongPeer
from p2p.machine import open_world
from p2p.node.cli import node_main
from p2p.node.process import check_key_place
from p2p.node.rundoc import RunBook, RunConfig
from roles.contract import open_run
from roles.demo.command import main as demo_main
from roles.own.__main__ import main as run_main
from sim.cli import main as sim_main
from tests.e2e.node_process import LOOPBACK, START_SECONDS, fail
from tests.support.processes import ROOT, lines_until, started
from tests.support.runs import RUN

ADDR = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWCKCeqLPSgMnDjyFsJuWqREDtKNHx1JEBiwaMXhCLNTRb"


def play(*command: str, cwd: Path | None = None, **env: str) -> tuple[int, str]:
    """Exit code and all output of a process of this Python."""
    with started(*command, cwd=cwd, **env) as process:
        output, _ = process.communicate(timeout=START_SECONDS)
        return process.returncode, output


# The screen


def test_status_is_json_lines_and_nothing_else(tmp_path: Path) -> None:
    """A block of text came first, and a program had to know which lines to skip."""
    run_file = tmp_path / "run.shoal"
    run_file.write_bytes(RUN.document)
    arguments = ["--data", str(tmp_path / "n"), "--run", str(run_file), *LOOPBACK]
    with started("-m", "p2p.node", *arguments, "--status", "0.05") as process:
        assert process.stdout is not None
        said = [json.loads(process.stdout.readline()) for _ in range(5)]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=START_SECONDS)
    assert [one.get("event") for one in said] == ["started", "joined", None, None, None]
    assert said[-1]["peer"] == said[0]["peer"]
    assert all(json.loads(line)["members"] == 0 for line in rest.splitlines())


def test_a_node_lives_without_streams_and_says_what_is_wrong_with_its_log(
    tmp_path: Path,
) -> None:
    """``2>&-`` and a log that is no file were tracebacks."""
    (tmp_path / "n" / "log").mkdir(parents=True)
    code, said = fail("--data", str(tmp_path / "n"), *LOOPBACK)
    sentence = "cannot be written: Is a directory; remove it"
    assert (code, said) == (1, f"error: the log {tmp_path / 'n' / 'log'} {sentence}\n")
    run_file = tmp_path / "run.shoal"
    run_file.write_bytes(RUN.document)
    arguments = ["--data", str(tmp_path / "m"), "--run", str(run_file), *LOOPBACK]
    command = ["sh", "-c", 'exec "$0" "$@" >&- 2>&-', sys.executable, "-m", "p2p.node"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, *arguments], env=env)
    try:
        while not (tmp_path / "m" / "run.shoal").exists() and process.poll() is None:
            select.select([], [], [], 0.05)
        process.terminate()
        assert process.wait(timeout=START_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


# Addresses that others cannot reach


class Deaf:
    """A host that reaches no bootstrap peer."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.dialled = 0

    async def connect_addr(self, addr: Multiaddr) -> PeerId:
        self.dialled += 1
        await trio.lowlevel.checkpoint()
        raise self.error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (PeerUnreachable("refused"), "nothing answers there: does that node run, "),
        (
            WrongPeer("another"),
            "another node answers there: is the id in the address out of date?",
        ),
        (ProtocolNotSupported("x"), "what answers there is no node of Shoal"),
        (trio.TooSlowError(), "no answer in time: is there a firewall"),
    ],
)
async def test_a_bootstrap_that_does_not_answer_is_one_line(
    error: Exception, cause: str, autojump_clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It was dialled, and complained of, 30 times a minute for ever."""
    host = Deaf(error)
    async with open_world() as world:
        with trio.move_on_after(600):
            book = RunBook(world, open_run)
            await book.wait_for_document(host, [Multiaddr.parse(ADDR)], RunConfig())  # type: ignore[arg-type]
    assert 20 <= host.dialled <= 24  # after 2, 6, 14, 30 and then every 30 seconds
    warnings = [
        record.getMessage() for record in caplog.records if record.levelname == "WARNING"
    ]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"no run from {ADDR}: {cause}")


# 14 to 17, 21: the simulator

SLOW = """
import time
from pathlib import Path

class Slow:
    async def run(self, swarm, scenario):
        seed = swarm.simulation.seed
        if seed > 2:
            time.sleep(1)  # by then the second's result has come to the process that sweeps
            Path(__file__).with_name("busy").open("wb").close()
            time.sleep(60)
        return {"seed": seed}
"""

WRONG = """
class Wrong:
    async def run(self, swarm, scenario):
        swarm.add("n0", self.live)
        await swarm.sleep(5)
        return {}

    async def live(self, node):
        await node.world.sleep(1)
        return {}["missing"]
"""


def scenario_file(folder: Path, workload: str, code: str = "", rest: str = "") -> Path:
    """A scenario of one's own, with its workload beside it."""
    folder.mkdir(exist_ok=True)
    module, _, _ = workload.partition(":")
    (folder / f"{module}.py").write_text(code)
    path = folder / "mine.toml"
    path.write_text(
        f'caption = "Mine?"\nworkload = "{workload}"\nnodes = 2\nduration = 9.0\n{rest}'
    )
    return path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["run", "churn", "--set", "lifetme=60"],
            "no parameter is called 'lifetme'; did you mean 'lifetime'?",
        ),
        (
            ["run", "churn", "--set", "lifetime=60,70"],
            "one value at a time; `sweep` tries several",
        ),
        (["run", "churn", "--set", "lifetime="], "write KEY=VALUE"),
        (["run", "churn", "--set", "nodes=2.5"], "nodes must be a whole number, not 2.5"),
        (["run", "churn", "--duration", "nan"], "duration must be a number, not nan"),
        (["run", "chrun"], "there is no scenario 'chrun'; did you mean 'churn'?"),
        (["sweep", "churn", "--set", "lifetme=1,2"], "did you mean 'lifetime'?"),
        (["sweep", "churn", "--seeds", "5-1"], "--seeds 5-1: write 1-200 or 3,5,8"),
        (["diff", "churn", "--level", "0"], "runs at level 1, not at level 0"),
        (
            ["diff", "churn", "--python", "no-such-python"],
            "--python no-such-python: there is no such program",
        ),
        (["trace", "churn", "--out", "x.json", "--set", "up=1"], "no parameter is called 'up'"),
        (["rnu", "churn"], "there is no command 'rnu'; did you mean 'run'?"),
        (
            ["run", "churn", "--report", "gone/x.html"],
            "--report gone/x.html: there is no folder gone",
        ),
        (
            ["run", "churn", "--json", "gone/x.json"],
            "--json gone/x.json: there is no folder gone",
        ),
        (["run", "churn", "--json", "."], "--json .: that is a folder"),
        (
            ["run", "churn", "--save-plan", "gone/x"],
            "--save-plan gone/x: there is no folder gone",
        ),
        (
            ["run", "churn", "--baseline", "gone/x.json"],
            "--baseline gone/x.json cannot be read",
        ),
        (["run", "churn", "--baseline", "list.json"], "is no result of `sim run --json`"),
        (["sweep", "churn", "--report", "gone/x.html"], "there is no folder gone"),
        (
            ["trace", "churn", "--out", "gone/x.json"],
            "--out gone/x.json: there is no folder gone",
        ),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_played(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Accepted in silence, or a traceback after the whole run."""
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sim.cli.run_scenario", lambda *_, **__: pytest.fail("it was played"))
    monkeypatch.setattr("sim.cli.open_executor", lambda *_: pytest.fail("it was played"))
    with suppress(SystemExit):  # argparse ends so
        assert sim_main(arguments) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_bug_in_ones_own_workload_has_a_file_and_a_line(tmp_path: Path) -> None:
    """It was shown as ``KeyError('missing')``."""
    path = scenario_file(tmp_path, "wrong:Wrong", WRONG)
    code, output = play("-m", "sim", "run", str(path), cwd=tmp_path)
    assert code == 1
    assert f'File "{tmp_path / "wrong.py"}", line 10, in live' in output
    last = " ".join(output.rpartition("the simulation failed")[2].split())
    assert last == ": node n0 at 1 s: KeyError: 'missing' (wrong.py:10 in live)"


def test_ctrl_c_of_a_sweep_keeps_what_had_ended(tmp_path: Path) -> None:
    """It took 28 s, and the runs that had ended were lost."""
    path = scenario_file(tmp_path, "slow:Slow", SLOW)
    os.mkfifo(tmp_path / "busy")  # becomes readable when the third run opens it
    busy = os.open(tmp_path / "busy", os.O_RDONLY | os.O_NONBLOCK)
    out = tmp_path / "out.json"
    arguments = ["sweep", str(path), "--seeds", "1-9", "--jobs", "1", "--json", str(out)]
    with started("-m", "sim", *arguments, cwd=tmp_path) as process:
        assert select.select([busy], [], [], START_SECONDS)[0], "the third run has not begun"
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 130
    assert "interrupted: 2 of 9 runs had ended" in output
    assert "2 runs, 0 failed" in output
    assert "Traceback" not in output
    os.close(busy)
    assert json.loads(out.read_text())["runs"] == 2


# The demo


def demo(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and what is said of a demo that must not begin."""
    try:
        code = demo_main(arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture
def no_demo_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roles.own.stage.trio.run", lambda *_: pytest.fail("it began"))


@pytest.mark.usefixtures("no_demo_begins")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sed", "3"], "there is no option --sed; did you mean '--seed'?"),
        (["--steps", "-1"], "argument --steps: -1 is not from 1 to"),
        (["--steps", "0"], "argument --steps: 0 is not from 1 to"),
        (["--seed", "1e30"], "argument --seed: '1e30' is no whole number"),
        (["--seed", str(2**70)], "argument --seed: "),
        (["--json", "gone/x.json"], "error: --json gone/x.json: there is no folder gone"),
        (
            ["--data", "/proc/nowhere"],
            "error: the nodes' data cannot be kept in /proc/nowhere: ",
        ),
        (["--data", "old"], "error: --data old holds the nodes of an earlier demo"),
    ],
)
def test_a_demo_that_cannot_be_played_does_not_begin(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``--steps -1`` and ``--json gone/x`` were tracebacks, the second after the whole demo."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.shoal").touch()
    code, said = demo(arguments, capsys)
    assert (code, sentence in said) == (2, True), said


@pytest.mark.deep
def test_ctrl_c_pressed_twice_ends_a_node_without_a_traceback(tmp_path: Path) -> None:
    """The second SIGINT came out as a `KeyboardInterrupt`."""
    arguments = ["--data", str(tmp_path / "n"), *LOOPBACK]
    with started("-m", "p2p.node", *arguments) as process:
        lines_until(process, "next")
        for _ in range(20):
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=START_SECONDS)
        assert (process.returncode, "Traceback" in output) == (0, False), output


# Keys, and other platforms


def git(folder: Path, *arguments: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_")
    }
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_no_key_is_made_where_git_would_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``git add .`` staged the private key of a node that was started in a checkout."""
    git(tmp_path, "init", "--quiet")
    monkeypatch.chdir(tmp_path)
    for command in (
        ["node", "--data", "mine"],
        ["node", "--data", "deep/er/mine", "--role", "none"],
        ["demo", "--data", "mine"],
        ["run", "create", "draft.toml", "--key", "mine/owner.key", "--out", "run.shoal"],
    ):
        (tmp_path / "mine").mkdir(exist_ok=True)
        commands = {"node": node_main, "demo": demo_main, "run": run_main}
        assert commands[command[0]](command[1:]) == 2, command
        said = capsys.readouterr().err
        assert "would be a private key inside the git work tree" in said
        assert f"{tmp_path / '.gitignore'}" in said
        assert not list(tmp_path.rglob("*key"))
    (tmp_path / ".gitignore").write_text("*.key\n")  # the owner's alone
    assert run_main(["init", "mine"]) == 2
    said = capsys.readouterr().err
    assert "trainer/key would be a private key" in said
    assert not list(tmp_path.rglob("*key"))
    line = re.search(r"add the line (\S+) to", said)
    assert line is not None
    (tmp_path / ".gitignore").write_text(line.group(1) + "\n")  # the remedy that was offered
    check_key_place(tmp_path / "mine" / "owner.key")
    (tmp_path / "mine" / "key").write_bytes(bytes(32))
    assert git(tmp_path, "status", "--porcelain", "--untracked-files=all") == "?? .gitignore\n"
    git(tmp_path, "add", "--force", "mine/key")
    with pytest.raises(ConfigError, match="would be a private key"):
        # tracked already: an ignore file does not help
        check_key_place(tmp_path / "mine" / "key")
    check_key_place(tmp_path.parent / "elsewhere" / "key")


def test_without_fcntl_the_remedy_is_named(tmp_path: Path) -> None:
    """On Windows the first thing that a newcomer saw was ``No module named 'fcntl'``."""
    # Not files of these names: some builds of Python have the modules compiled in.
    hide = 'import sys\nsys.modules["fcntl"] = sys.modules["resource"] = None\n'
    (tmp_path / "sitecustomize.py").write_text(hide)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    code, said = play("-m", "p2p.node", "--data", str(tmp_path / "n"), PYTHONPATH=path)
    assert (code, "WSL2" in said, "Traceback" in said) == (2, True, False), said
    code, said = play("-m", "roles.demo", PYTHONPATH=path)
    assert (code, "WSL2" in said, "Traceback" in said) == (2, True, False), said
