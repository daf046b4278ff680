"""A worker process that lies to its node, or dies in the middle of something."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2p.errors import StorageError, WorkerDied
from roles.workers import client
from roles.workers.calls import MAX_FRAME
from roles.workers.files import Scratch
from tests.unit.test_workers import opened

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="the worker finds its pipes in /proc"
)


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.0)


async def test_a_method_that_forks_answers_once(tmp_path: Path) -> None:
    """The child answered as well: each later call got the reply of the one before it."""
    async with opened(tmp_path) as remote:
        assert await remote.call("fork", 7) == 7
        assert [await remote.call("echo", number) for number in (1, 2, 3)] == [1, 2, 3]


async def test_what_a_dead_process_leaves_behind_holds_no_call_up(tmp_path: Path) -> None:
    """Its child had the pipe, which did not end: the node waited for the reply for ever."""
    async with opened(tmp_path) as remote:
        with pytest.raises(WorkerDied, match="exit -9"):
            await remote.call("abandon")
        assert await remote.call("echo", 1) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\0\0\0\x03abc",
        b"\0\0\0\x02\x92\xc3",
        b"\0\0\0\x03\x92\xc2\x90",
    ],
)
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
    async with opened(tmp_path) as remote:
        scratch = Scratch(remote._world, "scratch")
        async with scratch.files() as (answer, _):
            written = await remote.call("lay", what, answer, str(secret))
            with pytest.raises(StorageError, match=r"cannot be read|no file of this worker"):
                await scratch.read(written, bytes)


async def test_the_node_writes_through_no_link_of_the_worker(tmp_path: Path) -> None:
    """Names of later files are known: the node overwrote whatever they led to."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"old")
    async with opened(tmp_path) as remote:
        scratch = Scratch(remote._world, "scratch")
        await remote.call("lay", "link", str(tmp_path / "scratch/1"), str(precious))
        with pytest.raises(StorageError, match="cannot be written"):
            async with scratch.files([b"new"]):
                pass
    assert precious.read_bytes() == b"old"


@pytest.mark.parametrize("sizes", [[-1, 4], [2.5, 0.5], 3, ["3"], [MAX_FRAME]])
async def test_sizes_that_do_not_fit_a_file_are_no_records(
    tmp_path: Path, sizes: object
) -> None:
    async with opened(tmp_path) as remote:
        scratch = Scratch(remote._world, "scratch")
        async with scratch.files([b"abc"]) as (_, [file]):
            with pytest.raises(StorageError, match="cannot be read"):
                await scratch.read([file.path, sizes], bytes)


async def test_a_file_that_is_cut_off_while_it_is_read_ends_no_node(tmp_path: Path) -> None:
    """The node had mapped it: the kernel ended it with SIGBUS."""
    async with opened(tmp_path) as remote:
        scratch = Scratch(remote._world, "scratch")
        async with scratch.files([bytes(1 << 16)] * 9) as (_, [file]):

            def cut(record: bytes) -> bytes:
                os.truncate(file.path, 0)
                return record

            with pytest.raises(StorageError, match="cut off"):
                await scratch.read(file, cut)
