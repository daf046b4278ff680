"""Policies and folders that are not what they seem, and disks that are too small."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from p2p.errors import LimitExceeded, LocalProtocolError, StorageError
from p2p.machine import open_world
from p2p.shardcast import PolicyVersion, ShardcastConfig, publisher
from p2p.shardcast.index import digest_of
from p2p.shardcast.store import PolicyStore
from p2p.wire import KI, MIB
from tests.support.shardcast_town import Member, Town, publish

ONE = PolicyVersion(1)
HF_FOLDER = {
    "config.json": b'{"model_type": "tiny"}',
    "model-00001-of-00002.safetensors": b"first shard" * 20_000,
    "model-00002-of-00002.safetensors": b"second shard" * 10_000,
    "sub/empty.txt": b"",
    "tokenizer.json": b"{}" * 40_000,
}


@pytest.fixture
def town(tmp_path: Path) -> Town:
    return Town(tmp_path)


async def write_folder(member: Member, files: dict[str, bytes], root: str = "model") -> None:
    for path, data in files.items():
        await member.world.disk.write(f"{root}/{path}", data)


async def read_folder(member: Member, root: str) -> dict[str, bytes]:
    found = await member.world.disk.walk(root, 100)
    return {e.path: await member.world.disk.read(f"{root}/{e.path}") for e in found}


# Folders


async def test_a_folder_arrives_file_by_file(town: Town) -> None:
    with trio.fail_after(20):
        async with town.member(0) as trainer, town.member(1) as other:
            await write_folder(trainer, {**HF_FOLDER, ".gitattributes": b"", ".git/x": b"y"})
            await trainer.shardcast.publish(ONE, "model")
            await other.shardcast.wait_policy(ONE)
            assert await read_folder(other, other.shardcast.weights(ONE)) == HF_FOLDER
            assert await other.shardcast.check_weights(ONE) == other.shardcast.weights(ONE)
        async with town.member(1) as again:
            assert again.shardcast.newest == 1
            assert await read_folder(again, again.shardcast.weights(ONE)) == HF_FOLDER


def links_to(target: str) -> Callable[[Path], object]:
    return lambda model: (model / "link").symlink_to(target)


def is_cut_off_at(size: int) -> Callable[[Path], object]:
    header = json.dumps({"t": {"dtype": "BF16", "shape": [150], "data_offsets": [0, 300]}})
    data = len(header).to_bytes(8, "little") + header.encode() + bytes(300)
    name = "model-00001-of-00002.safetensors"
    return lambda model: (model / name).write_bytes(data[:size])


def holds(*names: str) -> Callable[[Path], object]:
    return lambda model: [(model / name).write_bytes(b"x") for name in names]


def is_empty(model: Path) -> None:
    for path in HF_FOLDER:
        (model / path).write_bytes(b"")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    **{  # a link to the publisher's ssh key would be the key, on every machine of the run
        f"a link to {target}": (links_to(target), "is a link to a folder or out of this one")
        for target in ("../key", "/etc/passwd", "nowhere", "sub")
    },
    "no file": (lambda model: os.mkfifo(model / "pipe"), "or no file"),
    "a name that not every system has": (holds("back\\slash"), "no path of a policy's file"),
    "names that differ in case only": (holds("Config.json"), "twice"),
    "names that one disk takes for one": (holds("\u00e9.bin", "e\u0301.bin"), "twice"),
    "too many files": (holds(*map(str, range(10))), "more files than the limit of 10"),
    "nothing": (is_empty, "no weights"),
    "a cut header": (is_cut_off_at(20), "is cut off"),
    "a cut tensor": (is_cut_off_at(200), "is cut off"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_folder_that_is_no_policy_is_refused_and_the_node_goes_on(
    town: Town, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, reason = REFUSED[what]
    monkeypatch.setattr(publisher, "MAX_FILES", 10)
    with trio.fail_after(20):
        async with town.member(0) as trainer:
            await write_folder(trainer, HF_FOLDER)
            prepare(town.folder / "0" / "model")
            with pytest.raises((LocalProtocolError, LimitExceeded), match=reason):
                await trainer.shardcast.publish(ONE, "model")
            assert trainer.shardcast.newest == -1
            await publish(trainer, 1)


@pytest.mark.parametrize("change", ["longer", "same size", "gone", "another"])
async def test_files_that_change_while_they_are_published_are_refused(
    town: Town, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = town.folder / "0" / "model"
    path = model / "config.json"

    def change_it() -> None:
        match change:
            case "longer":
                path.write_bytes(path.read_bytes() + b"!")
            case "same size":
                path.write_bytes(path.read_bytes()[:-1] + b"!")
            case "gone":
                path.unlink()
            case "another":
                (model / "a").write_bytes(b"x")

    cut_files = publisher.cut_files

    def changed_meanwhile(*args: object) -> object:
        change_it()
        return cut_files(*args)  # type: ignore[arg-type]

    with trio.fail_after(20):
        async with town.member(0) as trainer:
            await write_folder(trainer, HF_FOLDER)
            monkeypatch.setattr(publisher, "cut_files", changed_meanwhile)
            with pytest.raises(LocalProtocolError, match="changed while it was published"):
                await trainer.shardcast.publish(ONE, "model")
            monkeypatch.undo()
            await publish(trainer, 1)


async def test_files_that_change_after_they_were_published_convict_no_peer(
    town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not served: a receiver waits, rather than ban an origin that is careless."""
    with trio.fail_after(20):
        async with town.member(0) as trainer:
            await publish(trainer, 1)
            await trainer.world.disk.write("weights-1", b"overwritten", 200_000)
            trainer.shardcast._store._cache.clear()
            async with town.member(1) as other:
                while other.shardcast.fetching is None or other.shardcast.fetching.share < 0.9:
                    await other.world.sleep(0.01)
                await other.world.sleep(0.2)
                assert other.shardcast.newest == -1
                assert other.shardcast.stats.chunks_bad == 0
    assert "chunk_damaged" in caplog.text


# Chunks

WRONG: dict[str, Callable[[bytes], bytes]] = {
    "wrong": lambda wire: wire[:-1] + bytes((wire[-1] ^ 1,)),
    "short": lambda wire: wire[: len(wire) // 2],
    "endless": lambda wire: wire + bytes(3 * MIB),
    "another": lambda wire: (32 * KI | 1 << 31).to_bytes(4, "big") + bytes(32 * KI),
    "bomb": lambda _: bomb(),
}


def bomb() -> bytes:
    import zstandard

    frame = zstandard.ZstdCompressor().compress(bytes(500 * MIB))
    return len(frame).to_bytes(4, "big") + frame


@pytest.mark.parametrize("kind", WRONG)
async def test_a_peer_that_sends_no_chunks_is_dropped_and_the_policy_arrives(
    town: Town, kind: str
) -> None:
    with trio.fail_after(30):
        async with AsyncExitStack() as stack:
            trainer, liar = [await stack.enter_async_context(town.member(n)) for n in (0, 1)]
            weights = await publish(trainer, 1)
            await liar.shardcast.wait_policy(ONE)
            honest = liar.shardcast._store.chunk

            async def lie(policy: bytes, chunk: int) -> bytes | None:
                wire = await honest(policy, chunk)
                return None if wire is None else WRONG[kind](wire)

            liar.shardcast._store.chunk = lie  # type: ignore[method-assign]
            late = await stack.enter_async_context(town.member(2))
            await late.shardcast.wait_policy(ONE)
            assert await late.world.disk.read(late.shardcast.weights(ONE)) == weights
            assert late.shardcast.stats.chunks_bad == 1
            assert liar.host.peer_id not in late.host.connected


# Disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[None]:
    """A file system of 4 MB, where this process may mount one."""
    folder = tmp_path / "1"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "shoal-test", str(folder)]
    try:
        made = subprocess.run(mount, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if made.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_policy_that_is_larger_than_the_disk_is_given_up_and_the_node_lives(
    town: Town, small_disk: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with trio.fail_after(30):
        async with town.member(0) as trainer, town.member(1) as small, town.member(2) as other:
            weights = await publish(trainer, 1, 300_000)
            await small.shardcast.wait_policy(ONE)
            await publish(trainer, 2, 6 * MIB)
            await other.shardcast.wait_policy(PolicyVersion(2))
            while not small.shardcast.stats.versions_too_large:
                await small.world.sleep(0.01)
            assert "no room for version 2, of 6291456 bytes" in caplog.text
            assert small.shardcast.newest == 1
            assert await small.world.disk.read(small.shardcast.weights(ONE)) == weights
            async with town.member(3) as late:
                del late  # it is served by all who are there
            await publish(trainer, 3, 300_000)
            assert await small.shardcast.wait_policy(PolicyVersion(3)) == 3
            left = await small.world.disk.walk("policies", 100)
            assert sum(e.size for e in left) < 700_000, "nothing of version 2 is left"


async def test_two_pulls_into_one_folder_do_not_meet(tmp_path: Path, town: Town) -> None:
    """The second says so at once, rather than write where the first moves files away."""
    with trio.fail_after(20):
        async with town.member(0), open_world(tmp_path / "0", town.keys[0]) as world:
            store = PolicyStore(world, ShardcastConfig(), b"run")
            with pytest.raises(StorageError, match="another process is using"), store.holding():
                pytest.fail("the lock was free")
        async with open_world(tmp_path / "0", town.keys[0]) as world:
            with PolicyStore(world, ShardcastConfig(), b"run").holding():
                assert digest_of(b"")
