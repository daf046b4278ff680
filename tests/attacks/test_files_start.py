"""The files that a node needs before it can do anything: its key and its pinned run
file.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from p2p.errors import ConfigError, StorageError
from p2p.identity import SEED_BYTES, KeyPair
from p2p.ledger import Ledger
from p2p.ledger.core.chain import EMPTY
from p2p.machine import RealWorld, load_or_create_key, open_world
from p2p.node.rundoc import PATH, RunBook
from roles.contract.core.file import open_run
from tests.e2e.node_process import START_SECONDS, fail, node
from tests.support.runs import RUN

GARBAGE = "☃ no log".encode("utf-16") + bytes(5000)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_no_bit_of_a_key_changes_unseen(tmp_path: Path) -> None:
    """With one bit flipped the node was another peer, without a word."""
    path = tmp_path / "key"
    key = load_or_create_key(path)
    data = path.read_bytes()
    assert load_or_create_key(path).peer_id == key.peer_id
    for bit in range(8 * len(data)):
        path.write_bytes(flipped(data, bit))
        with pytest.raises(StorageError, match="restore it from a copy"):
            load_or_create_key(path)
    for length in range(len(data)):
        path.write_bytes(data[:length])
        if length == SEED_BYTES:  # as older versions wrote it, and the right one
            assert load_or_create_key(path).peer_id == key.peer_id
        else:
            with pytest.raises(StorageError, match="restore it from a copy"):
                load_or_create_key(path)


@pytest.mark.parametrize(
    "data",
    [b"", RUN.document[:-5], flipped(RUN.document, 400)],
    ids=["empty", "cut", "flipped"],
)
async def test_a_damaged_pin_is_replaced_by_the_person_only(
    data: bytes, tmp_path: Path
) -> None:
    """An emptied one counted as none, and the next peer chose the run and its
    owner.
    """
    (tmp_path / PATH).write_bytes(data)
    world = RealWorld(KeyPair(b"a" * 32), tmp_path)
    with pytest.raises(ConfigError, match=f"--run and a sound copy, or remove .*{PATH}"):
        await RunBook(world, open_run).load()
    book = RunBook(world, open_run)
    await book.load(RUN.document)
    assert book.run == RUN
    assert (tmp_path / PATH).read_bytes() == RUN.document


def test_a_key_that_is_damaged_ends_a_node_with_a_sentence(tmp_path: Path) -> None:
    """Exit code 1, the file, and what to do; no traceback."""
    load_or_create_key(tmp_path / "key")
    data = (tmp_path / "key").read_bytes()
    (tmp_path / "key").write_bytes(flipped(data, 100))
    (tmp_path / "run.shoal").write_bytes(RUN.document)
    code, said = fail("--data", str(tmp_path))
    assert (code, said.count("\n")) == (1, 1), said
    assert (
        f"{tmp_path / 'key'} is damaged, or no key: restore it from a copy, or remove it"
        in said
    )


def test_a_node_starts_whatever_became_of_its_lock_and_its_logs(tmp_path: Path) -> None:
    """Nothing is read from them. Exit code 0 when it is told to end."""
    (tmp_path / "run.shoal").write_bytes(RUN.document)
    names = ("lock", "log", "log.1")
    for name in names:
        (tmp_path / name).write_bytes(GARBAGE)
    assert start_and_end(tmp_path) == 0
    assert (tmp_path / "log").read_bytes().startswith(GARBAGE)
    for name in names:
        (tmp_path / name).unlink()
    assert start_and_end(tmp_path) == 0
    assert (tmp_path / "lock").exists()
    assert (tmp_path / "log").exists()


def start_and_end(folder: Path) -> int:
    """The exit code of a node that is told to end once it has started. How fast is for others
    to test.
    """
    with node(folder) as running:
        assert running.line()["event"] == "started"
        running.process.send_signal(signal.SIGINT)
        return running.process.wait(timeout=START_SECONDS)


async def test_a_ledger_that_is_gone_as_a_whole_is_not_missed(tmp_path: Path) -> None:
    """The table says so: it looks like a new node's. Only whoever kept an older entry can
    tell.
    """
    async with open_world(tmp_path) as world:
        ledger = await Ledger(world).opened()
        await ledger.append("verdict", b"first")
        await world.disk.remove("ledger")
        ledger = await Ledger(world).opened()
        assert ledger.head == EMPTY
