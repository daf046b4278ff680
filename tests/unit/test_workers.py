"""Worker processes: values, failures and files cross whole, and nothing outlives the node."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.errors import BadMessage, ConfigError, ShoalError, StorageError, WorkerDied
from p2p.machine import RealWorld, open_world
from p2p.wire import fields_untrusted
from p2p.worker_process import ProcessWorker
from roles.workers import client
from roles.workers.calls import (
    MAX_FRAME,
    MAX_SAID,
    Failure,
    decode_reply,
    encode_request,
    read_frame,
    write_frame,
)
from roles.workers.client import Remote, WorkerLost, open_remote
from roles.workers.files import MappedRecords, RecordFile, Scratch, write_records
from tests.support.processes import kill_family

ARGV = ("tests.unit.remote_worker",)
RECORDS = [bytes([number]) * number for number in (0, 1, 5, 40, 3)]


class Broken(ShoalError):
    """What is not named."""


@asynccontextmanager
async def scratched(
    folder: Path, *, keeps: bool = True
) -> AsyncIterator[tuple[Remote, Scratch]]:
    async with open_world(folder) as world, AsyncExitStack() as stack:
        remote = Remote(
            world, ARGV, stack, name="sums", otherwise=Broken,
            raises=(ConfigError, StorageError), keeps=keeps,
        )  # fmt: skip
        assert await remote.start("configure", 1) == "ready"
        yield remote, Scratch(world, "scratch")


@asynccontextmanager
async def opened(folder: Path, *, keeps: bool = True) -> AsyncIterator[Remote]:
    async with scratched(folder, keeps=keeps) as (remote, _):
        yield remote


def kill(remote: Remote) -> None:
    assert isinstance(remote.process, ProcessWorker)
    kill_family(remote.process.pid)


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.0)


async def test_values_and_failures_cross_as_they_are(tmp_path: Path) -> None:
    async with opened(tmp_path) as remote:
        value = [None, True, -(2**40), 0.1, "ü", b"\0", {"a": [1]}]
        assert await remote.call("echo", value) == value
        assert await remote.call("echo", (1, 2)) == [1, 2]
        with pytest.raises(ConfigError, match=r"^as it is$"):
            await remote.call("fail", "as it is")
        with pytest.raises(StorageError, match="No space left"):
            await remote.call("fail", "full")
        with pytest.raises(Broken, match=r"fail failed with OSError: .*Cannot allocate"):
            await remote.call("fail", "memory")
        with pytest.raises(ConfigError) as quoted:
            await remote.call("fail", "quotes")
        assert str(quoted.value).startswith(r"weights: \ud800x")
        assert len(str(quoted.value)) < 2 * MAX_SAID
        with pytest.raises(Broken, match="over the limit"):
            await remote.call("echo", bytes(MAX_FRAME))
        assert await remote.call("add", 4) == 5, "one process answered them all"


@pytest.mark.parametrize("method", ["fail", "_private", "absent"])
async def test_a_bug_ends_the_process(tmp_path: Path, method: str) -> None:
    async with opened(tmp_path) as remote:
        with pytest.raises(WorkerDied, match="process of sums ended"):
            await remote.call(method, *(["bug"] if method == "fail" else []))
        assert await remote.call("add", 1) == 2, "a new one, configured as the first"


async def test_the_death_of_a_process_that_keeps_something_is_told_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as remote:
        assert await remote.call("add", 9) == 10
        for _ in range(client.MOST_DEATHS):
            kill(remote)
            with pytest.raises(WorkerDied, match="process of sums ended"):
                await remote.call("add", 1)
            assert await remote.call("add", 1) == 2


async def test_one_that_always_dies_at_a_method_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as remote:
        pauses: list[float] = []

        async def sleep(_: object, seconds: float) -> None:
            pauses.append(seconds)

        monkeypatch.setattr(RealWorld, "sleep", sleep)
        monkeypatch.setattr(client, "FIRST_PAUSE", 1.0)
        mark = str(tmp_path / "mark")
        for _ in range(client.MOST_DEATHS - 1):
            with pytest.raises(WorkerDied, match="process of sums ended"):
                await remote.call("die", mark, 99)
            assert await remote.call("add", 1) == 2, "what else it answers does not count"
        with pytest.raises(WorkerLost, match=r"5 times in a row at die: .* the memory"):
            await remote.call("die", mark, 99)
    assert pauses == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize("times", [2, 99])
async def test_one_that_dies_while_it_starts_is_replaced(tmp_path: Path, times: int) -> None:
    gives_up = pytest.raises(WorkerLost, match="5 times in a row at die")
    async with (
        open_world(tmp_path) as world,
        open_remote(world, ARGV, name="sums", otherwise=Broken) as remote,
    ):
        with nullcontext() if times == 2 else gives_up:
            assert await remote.start("die", str(tmp_path / "mark"), times) == 3


async def test_a_cancelled_call_ends_the_process(tmp_path: Path) -> None:
    async with opened(tmp_path) as remote:
        with trio.move_on_after(0.1):
            await remote.call("hang")
        with pytest.raises(WorkerDied):
            await remote.call("add", 1)
        assert await remote.call("add", 1) == 2
    async with opened(tmp_path, keeps=False) as remote:
        with trio.move_on_after(0.1):
            await remote.call("hang")
        assert await remote.call("add", 1) == 2, "it kept nothing that could be missed"
        with pytest.raises(trio.TooSlowError):
            await remote.call("hang", patience=0.1)
        assert await remote.call("add", 1) == 2


def count_untrusted(value: object) -> int:
    (count,) = fields_untrusted(value, int, what="count")
    return int(count)


async def test_a_stranger_s_reply_is_read_or_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, keeps=False) as remote:
        assert await remote.call("echo", [7], read=count_untrusted) == 7
        assert await remote.call("add", 1) == 2
        with pytest.raises(BadMessage, match="wrong type"):
            await remote.call("echo", ["7"], read=count_untrusted)
        assert await remote.call("add", 1) == 2, "one that answers nonsense is replaced"
        with pytest.raises(BadMessage):
            await remote.call("echo", [[0] * 999], read=count_untrusted, max_items=100)


async def test_files_go_both_ways_and_none_is_left(tmp_path: Path) -> None:
    place = tmp_path / "scratch"
    async with scratched(tmp_path) as (remote, scratch):
        for records in (RECORDS, [b""], [bytes(MAX_FRAME), b"x"]):
            expected = [max(records, key=len), b"", *records[:2]]
            async with scratch.files(records, []) as (answer, (file, nothing)):
                assert list(MappedRecords(nothing, bytes)) == []
                written = await remote.call("longest", file, answer)
                assert await scratch.read(written, bytes) == expected
            assert list(place.iterdir()) == []
        (place / "of an earlier life").touch()
        await scratch.clear()
        assert not place.exists() or list(place.iterdir()) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, replace_by_a_folder, Path.unlink])
def test_a_file_that_is_not_there_whole_is_said(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    file = write_records(str(tmp_path / "folder/file"), RECORDS)
    records = MappedRecords(RecordFile(*file), len)
    assert (list(records), records[-1], records[1:3]) == ([0, 1, 5, 40, 3], 3, [1, 5])
    assert list(pickle.loads(pickle.dumps(records))) == list(records)
    damage(Path(file.path))
    with pytest.raises(StorageError, match=r"folder/file (cannot be read|has 48 bytes)"):
        MappedRecords(file, len)
    with pytest.raises(StorageError, match="cannot be written"):
        write_records(str(tmp_path / "folder"), RECORDS)


def test_what_it_prints_garbles_no_frame_and_it_ends_with_its_input() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-m", *ARGV], stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        write_frame(process.stdin, encode_request("configure", -1))
        assert decode_reply(read_frame(process.stdout)) == Failure(
            "ConfigError", "start is negative: count from 0"
        )
        write_frame(process.stdin, encode_request("hang"))
        process.stdin.close()
        assert process.wait(60) == 0
        assert process.stdout.read() == b""
        errors = process.stderr.read()
    assert b"noise of a library" in errors
    assert b"noise of C code" in errors


# Workers that lie, or die in the middle of something


async def test_a_method_that_forks_answers_once_and_one_that_dies_holds_no_call_up(
    tmp_path: Path,
) -> None:
    """Each later call got the reply of the one before it, or waited for ever for the child."""
    async with opened(tmp_path) as remote:
        assert await remote.call("fork", 7) == 7
        assert [await remote.call("echo", number) for number in (1, 2, 3)] == [1, 2, 3]
        with pytest.raises(WorkerDied, match="exit -9"):
            await remote.call("abandon")
        assert await remote.call("echo", 1) == 1


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="finds its pipes in /proc")
@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x03abc", b"\0\0\0\x02\x92\xc3",
     b"\0\0\0\x03\x92\xc2\x90"],
)  # fmt: skip
async def test_garbage_in_the_pipe_costs_the_process(tmp_path: Path, data: bytes) -> None:
    """It raised msgpack's errors in the node, or `LimitExceeded`, which no role expects."""
    async with opened(tmp_path) as remote:
        with pytest.raises(WorkerDied, match="answered nonsense"):
            await remote.call("garble", data)
        assert await remote.call("echo", 1) == 1


@pytest.mark.parametrize("what", ["pipe", "link", "elsewhere"])
async def test_only_files_of_the_worker_s_folder_are_read(tmp_path: Path, what: str) -> None:
    """A pipe held a thread of the node for ever; a link gave the worker any of its files."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    async with scratched(tmp_path) as (remote, scratch), scratch.files() as (answer, _):
        written = await remote.call("lay", what, answer, str(secret))
        with pytest.raises(StorageError, match=r"cannot be read|no file of this worker"):
            await scratch.read(written, bytes)


async def test_the_node_writes_through_no_link_of_the_worker(tmp_path: Path) -> None:
    """Names of later files are known: the node overwrote whatever they led to."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"old")
    async with scratched(tmp_path) as (remote, scratch):
        await remote.call("lay", "link", str(tmp_path / "scratch/1"), str(precious))
        with pytest.raises(StorageError, match="cannot be written"):
            async with scratch.files([b"new"]):
                pass
    assert precious.read_bytes() == b"old"


@pytest.mark.parametrize("sizes", [[-1, 4], [2.5, 0.5], 3, ["3"], [MAX_FRAME]])
async def test_sizes_that_do_not_fit_a_file_are_no_records(
    tmp_path: Path, sizes: object
) -> None:
    async with scratched(tmp_path) as (_, scratch), scratch.files([b"abc"]) as (_, [file]):
        with pytest.raises(StorageError, match="cannot be read"):
            await scratch.read([file.path, sizes], bytes)


async def test_a_file_that_is_cut_off_while_it_is_read_ends_no_node(tmp_path: Path) -> None:
    """The node had mapped it: the kernel ended it with SIGBUS."""
    many = [bytes(1 << 16)] * 9
    async with scratched(tmp_path) as (_, scratch), scratch.files(many) as (_, [file]):

        def cut(record: bytes) -> bytes:
            os.truncate(file.path, 0)
            return record

        with pytest.raises(StorageError, match="cut off"):
            await scratch.read(file, cut)
