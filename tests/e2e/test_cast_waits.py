"""What ``shoal`` says while it waits, how it goes on, and how it ends."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest

from p2p.cast.view import Teller
from p2p.machine import RealWorld
from p2p.naming import MAX_NAME
from p2p.node.folders import SOCKET
from p2p.node.usage import SOON
from tests.e2e.cast_process import LOCAL, cast, contents, push_of
from tests.e2e.forked import COMMANDS, ROOT, Forks, Surroundings
from tests.sweeps import swept
from tests.terminal import terminal

MAIN = "import sys; from p2p.node.commands import main; sys.exit(main())"
SHOAL = [sys.executable, "-c", MAIN]
NOBODY = "http://127.0.0.1:1"  # a server that does not answer


def pushed(folder: Path, size: int = 24_000_000) -> Path:
    folder.mkdir(parents=True)
    (folder / "w.bin").write_bytes(Random(0).randbytes(size))
    return folder


# What a command that waits says


def test_it_is_said_within_five_seconds() -> None:
    assert max(SOON, Teller("push", as_json=True).interval) <= 5


@pytest.mark.deep
def test_a_pull_waits_for_room_and_goes_on_when_it_is_made(tmp_path: Path) -> None:
    """It said nothing and hung for ever, also when there was room again."""

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000_000, resource.RLIM_INFINITY))

    with push_of(pushed(tmp_path / "model"), tmp_path / "p") as (_, ticket):
        out = tmp_path / "out"
        with cast("pull", ticket, "--out", out, "--seed", 0, *LOCAL, preexec_fn=small) as pull:
            waits = pull.said("progress", that=lambda event: "room" in event["waits_for"])
            assert f"waits for room in {out}: it needs 24.0 MB" in waits["waits_for"]
            assert contents(out) == {}
            whole = resource.RLIM_INFINITY, resource.RLIM_INFINITY
            resource.prlimit(pull.process.pid, resource.RLIMIT_FSIZE, whole)
            pull.said("whole", timeout=120)
            assert pull.end() == 0
        assert contents(out) == contents(tmp_path / "model")


@pytest.mark.deep
def test_a_pull_and_a_push_say_whom_they_wait_for(tmp_path: Path) -> None:
    with push_of(pushed(tmp_path / "model", 1000), tmp_path / "p") as (push, ticket):
        assert push.said("progress")["members"] == 0
    with cast("pull", ticket, "--out", tmp_path / "out", *LOCAL) as pull:
        first = pull.said("progress")
        assert first["waits_for"] == "waits for the pusher"
        pull.said("progress", that=lambda event: "own machine" in event["waits_for"])
    with cast("pull", NOBODY, "--out", tmp_path / "http", "--json") as pull:
        assert NOBODY in pull.said("progress")["waits_for"]
    with cast("pull", ticket, "--out", tmp_path / "text", *LOCAL[:-1]) as pull:
        assert pull.process.stdout is not None  # lines for people are no JSON
        pull.process.kill()


@contextmanager
def silent_node(folder: Path) -> Iterator[None]:
    """A node that takes connections and says nothing, as one that was stopped."""
    folder.mkdir()
    with closing(socket.socket(socket.AF_UNIX)) as door:
        door.bind(str(folder / SOCKET))
        door.listen()
        yield


@pytest.mark.parametrize("command", swept(["status", "peers", "top", "pause", "resume"], 1))
def test_who_asks_a_silent_node_is_told_so(command: str, tmp_path: Path) -> None:
    line = [command, str(tmp_path / "n")]
    if command in {"status", "peers", "top"}:
        line.insert(1, "--data")
    with silent_node(tmp_path / "n"):
        process = subprocess.Popen([*SHOAL, *line], stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        with process:
            assert process.stderr.readline().startswith("waits for the node at ")
            assert process.poll() is None
            process.kill()


@pytest.mark.deep
def test_a_fetch_that_waits_for_another_says_so(tmp_path: Path) -> None:
    with (tmp_path / "m.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = [*SHOAL, "models", "fetch", "smollm2", "--out", str(tmp_path / "m")]
        with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert "waits for another process" in process.stderr.readline()
            process.kill()


# Names and files that cannot be written


async def test_files_of_a_node_may_have_the_longest_names(tmp_path: Path) -> None:
    from p2p.identity import KeyPair
    from p2p.machine import load_or_create_key

    name = "n" * MAX_NAME
    disk = RealWorld(KeyPair(bytes(32)), tmp_path).disk
    await disk.replace(name, b"data")
    assert await disk.read(name) == b"data"
    key = load_or_create_key(tmp_path / ("k" * MAX_NAME))
    assert load_or_create_key(tmp_path / ("k" * MAX_NAME)).peer_id == key.peer_id
    assert sorted(await disk.list("")) == ["k" * MAX_NAME, name]


def test_no_temporary_name_is_a_given_name_and_more() -> None:
    longer = re.compile(r"with_name\([^()]*\.name \+|with_suffix\(|prefix=f\"")
    for package in ("p2p", "roles"):
        for path in (ROOT / package).rglob("*.py"):
            assert not longer.search(path.read_text(encoding="utf-8")), path


@pytest.mark.deep
def test_a_file_in_the_way_costs_only_itself_and_the_machine_does_not_count(
    tmp_path: Path,
) -> None:
    source, out = pushed(tmp_path / "model", 1000), tmp_path / "out"
    (source / "z.bin").write_bytes(b"z")
    (out / "w.bin" / "inside").mkdir(parents=True)
    with push_of(source, tmp_path / "p", "--expect", 1) as (push, ticket):
        with cast("pull", ticket, "--out", out, *LOCAL) as pull:
            assert pull.end() == 1
            said = pull.errors()
            assert "w.bin cannot be written" in said
            assert "(1 of 2 files; the others are there)" in said
        assert (out / "z.bin").read_bytes() == b"z"
        assert push.process.poll() is None
        (out / "w.bin" / "inside").rmdir()
        (out / "w.bin").rmdir()
        with cast("pull", ticket, "--out", out, *LOCAL) as pull:
            assert (pull.end(), push.end()) == (0, 0)


# How commands end


def table() -> dict[str, list[str]]:
    """The rows of docs/exit-codes.md, by command."""
    rows: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "exit-codes.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        for name in re.findall(r"`(\w+)`", cells[0]) if len(cells) == 4 else ():
            rows[name] = cells[1:]
    return rows


def test_the_table_of_exit_codes_has_every_command() -> None:
    assert set(table()) == set(COMMANDS)


WRONG = {"ledger": ["show", "--sed"], "run": ["show", "--sed"], "models": ["inspect", "--sed"]}
DONE: dict[str, list[str]] = {
    "key": ["n"], "doctor": ["--help"], "inspect": ["w"], "sim": ["list"],
    "models": ["--help"], "run": ["--help"],
}  # fmt: skip
FAILED: dict[str, list[str]] = {
    "key": ["/proc/n"], "status": ["--data", "."], "peers": ["--data", "."],
    "top": ["--data", "."], "pause": ["."], "resume": ["."], "inspect": ["empty"],
    "push": ["empty"], "serve": ["empty", "--http", "127.0.0.1:0"],
    "pull": ["http://127.0.0.1:1", "--out", "/proc/n"],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_codes_are_those_of_the_table(command: str, shells: Forks, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    (folder / "empty").mkdir(parents=True)
    (folder / "empty" / "x").touch()
    (folder / "w").write_bytes(b"w")
    for code, lines in ((2, {command: WRONG.get(command, ["--sed"])}), (0, DONE), (1, FAILED)):
        if command in lines:
            around = Surroundings(env={"XDG_STATE_HOME": str(tmp_path / "state")})
            said = shells.run([command, *lines[command]], folder, around)
            assert said[0] == code, said


INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.deep
@pytest.mark.parametrize("number", INTERRUPTED)
def test_an_interrupted_command_says_what_was_done(number: int, tmp_path: Path) -> None:
    """A pull that had pulled nothing ended with 0, a push without a word."""
    source = pushed(tmp_path / "model", 1000)
    with push_of(source, tmp_path / "p", "--expect", 2) as (push, ticket):
        push.process.send_signal(number)
        assert push.said("ended")["machines"] == 0
        assert push.end() == INTERRUPTED[number]
    for line in ((ticket, "--only", "*.bin"), (ticket, "--follow"), (NOBODY,)):
        with cast("pull", *line, "--out", tmp_path / "out", "--json") as pull:
            pull.said("progress", that=lambda event: event["waits_for"] != "")
            pull.process.send_signal(number)
            pull.said("ended")
            assert pull.end() == INTERRUPTED[number], line
    with push_of(source, tmp_path / "p") as (push, ticket):
        with cast("pull", ticket, "--out", tmp_path / "out", "--follow", *LOCAL) as pull:
            pull.said("whole")
            pull.process.send_signal(number)
            pull.said("ended")
            assert pull.end() == 0, "all of it is here"
        push.process.send_signal(number)
        assert push.said("ended")["given"] >= 1000
        assert push.end() == 0, "it pushes until it is told to end"
    state = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    with cast("serve", source, "--http", "127.0.0.1:0", "--json", env=state) as serve:
        serve.said("http")
        serve.process.send_signal(number)
        serve.said("ended")
        assert serve.end() == 0


@pytest.mark.deep
def test_a_pull_is_played_in_a_terminal_and_ended_by_ctrl_c(tmp_path: Path) -> None:
    with push_of(pushed(tmp_path / "model", 1000), tmp_path / "p") as (_, ticket):
        line = ["pull", ticket, "--out", str(tmp_path / "out"), "--seed", "1000"]
        with terminal(*SHOAL[1:], *line) as shown:
            shown.wait("passing on")
            shown.press_ctrl_c()
            assert shown.end() == 0
    assert "the same command line goes on" in shown.said
    assert "Traceback" not in shown.said
