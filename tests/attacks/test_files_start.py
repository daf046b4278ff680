"""Issue 10.7: the files that a node needs before it can do anything: its key and its pinned run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p.errors import ConfigError, StorageError
from p2p.identity import SEED_BYTES, KeyPair
from p2p.machine import RealWorld, load_or_create_key
from p2p.node.rundoc import PATH, RunBook
from roles.run.file import open_run
from tests.unit.test_run_file import RUN


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_no_bit_of_a_key_changes_unseen(tmp_path: Path) -> None:
    """Issue 10.7: with one bit flipped the node was another peer, without a word."""
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
    "data", [b"", RUN.document[:-5], flipped(RUN.document, 400)], ids=["empty", "cut", "flipped"]
)
async def test_a_damaged_pin_is_replaced_by_the_person_only(data: bytes, tmp_path: Path) -> None:
    """Issue 10.7: an emptied one counted as none, and the next peer chose the run and its owner."""
    (tmp_path / PATH).write_bytes(data)
    world = RealWorld(KeyPair(b"a" * 32), tmp_path)
    with pytest.raises(ConfigError, match=f"--run and a sound copy, or remove .*{PATH}"):
        await RunBook(world, open_run).load()
    book = RunBook(world, open_run)
    await book.load(RUN.document)
    assert book.run == RUN
    assert (tmp_path / PATH).read_bytes() == RUN.document
