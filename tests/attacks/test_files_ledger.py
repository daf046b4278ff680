"""A ledger whose files have changed opens with every acknowledged entry, or not at
all.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from p2p.errors import StorageError
from p2p.identity import KeyPair, verify
from p2p.ledger import Ledger
from p2p.machine import RealWorld
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.disk import DiskHandle, SimDisk
from sim.node.world import SimWorld

AUTHOR = KeyPair(b"a" * 32)
SLOTS = 4096 + 80
"""Bytes of ``synced`` that mean anything end here."""

Change = Callable[[SimDisk], None]


class MemoryWorld(RealWorld):
    """A machine whose disk is in memory and takes no time."""

    def __init__(self, disk: SimDisk) -> None:
        super().__init__(AUTHOR, Path("/nowhere"))

        async def at_once(seconds: float) -> None:
            await trio.lowlevel.checkpoint()

        self.disk = DiskHandle(disk, at_once, lambda: True)

    async def run_blocking(self, function: Callable[..., Any], *args: Any, cost: float) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*args)


async def written(entries: int, segment_bytes: int) -> tuple[SimDisk, list[bytes]]:
    """A disk with a ledger, and the digests of what was acknowledged."""
    disk, told = SimDisk("node"), []
    ledger = await Ledger(MemoryWorld(disk), segment_bytes=segment_bytes).opened()
    for number in range(entries):
        told.append((await ledger.append("verdict", b"%d" % number * 3)).digest)
    return disk, told


def copied(disk: SimDisk) -> SimDisk:
    copy = SimDisk("copy")
    for path in disk.paths():
        copy.replace_now(path, disk.read_now(path, 0, None))
    return copy


def put(path: str, data: bytes) -> Change:
    return lambda disk: disk.replace_now(path, data)


def flip(path: str, data: bytes, bit: int) -> Change:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return put(path, bytes(changed))


def zeroed(path: str, data: bytes, start: int) -> Change:
    return put(path, data[:start] + bytes(len(data) - start))


def removed(path: str) -> Change:
    return lambda disk: disk.remove_now(path)


def all_damage(disk: SimDisk) -> Iterator[tuple[str, Change]]:
    """Every flipped bit, every truncation, every zeroed tail, every removal."""
    for path in disk.paths():
        data = disk.read_now(path, 0, None)
        meant = (
            [*range(80), *range(4096, SLOTS)] if path.endswith("synced") else range(len(data))
        )
        for byte in meant:
            for bit in range(8):
                yield f"{path} bit {8 * byte + bit}", flip(path, data, 8 * byte + bit)
            yield f"{path} cut at {byte}", put(path, data[:byte])
            if any(data[byte:]):
                yield f"{path} zeros from {byte}", zeroed(path, data, byte)
        yield f"{path} removed", removed(path)


async def reopen(disk: SimDisk, segment_bytes: int) -> list[bytes]:
    """What a node finds there; what it adds is there the next time."""
    ledger = await Ledger(MemoryWorld(disk), segment_bytes=segment_bytes).opened()
    found = [entry.digest async for entry in ledger.entries()]
    last = await ledger.append("verdict", b"next")
    assert last.seqno == len(found)
    return found


async def outcome(disk: SimDisk, change: Change, segment_bytes: int) -> list[bytes] | str:
    """The entries found on a changed disk, or the sentence that refuses it."""
    damaged = copied(disk)
    change(damaged)
    try:
        return await reopen(damaged, segment_bytes)
    except StorageError as error:
        return str(error)


def is_said(sentence: str) -> bool:
    return "/ledger" in sentence and "restore the ledger" in sentence


async def test_no_change_of_any_file_cuts_an_acknowledged_entry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Exhaustive, 12,000 damages of a ledger of 5 entries in 2 segments."""
    caplog.set_level(logging.ERROR)
    disk, told = await written(5, 400)
    assert len(disk.paths()) == 3
    count = 0
    for what, change in all_damage(disk):
        found = await outcome(disk, change, 500)
        if isinstance(found, str):
            assert is_said(found), (what, found)
        else:
            assert found == told, what
            assert "synced" in what, f"{what}: a changed segment was believed"
        count += 1
    assert count > 10_000


async def test_a_long_ledger_is_cut_by_nothing_either(caplog: pytest.LogCaptureFixture) -> None:
    """A length near the end cut up to 8 entries; rot and trailing zeros cut 300 of
    400.
    """
    caplog.set_level(logging.ERROR)
    disk, told = await written(400, 40_000)
    rng = Random(8)
    for path in disk.paths():
        if path.endswith("synced"):
            continue
        data = disk.read_now(path, 0, None)
        for _ in range(40):
            place = rng.randrange(len(data))
            near_end = len(data) - 1 - rng.randrange(min(len(data), 1500))
            for change in (
                flip(path, data, 8 * place + rng.randrange(8)),
                flip(path, data, 8 * near_end + rng.randrange(8)),
                put(path, data[:place]),
                put(
                    path,
                    data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] + bytes(16),
                ),
            ):
                sentence = await outcome(disk, change, 40_000)
                assert isinstance(sentence, str)
                assert path in sentence
                assert is_said(sentence)
    assert await reopen(copied(disk), 40_000) == told


async def test_a_damaged_record_of_how_far_it_goes_is_made_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`synced` is needed to tell torn from rotten; a ledger that is neither does
    without.
    """
    disk, told = await written(5, 500)
    data = disk.read_now("ledger/synced", 0, None)
    for change in (
        removed("ledger/synced"),
        put("ledger/synced", b""),
        flip("ledger/synced", data, 100),
    ):
        caplog.clear()
        assert await outcome(disk, change, 500) == told
        assert "it is made again" in caplog.text
        caplog.clear()
        damaged = copied(disk)
        change(damaged)
        await reopen(damaged, 500)
        assert len(await reopen(damaged, 500)) == 6  # the second time there is nothing to mend
        assert caplog.text.count("it is made again") == 1
        torn = copied(disk)
        change(torn)
        torn.append_now("ledger/00000000.seg", b"\0\0\0")
        with pytest.raises(StorageError, match="restore the ledger"):
            await reopen(torn, 500)


async def test_an_entry_that_rots_while_the_node_runs_is_not_handed_out() -> None:
    """A flipped signature was read, served, and believed by this node."""
    disk, _ = await written(5, 500)
    ledger = await Ledger(MemoryWorld(disk), segment_bytes=500).opened()
    first: Ledger = ledger
    entry = await first.read(2)
    assert entry.is_signed(verify)
    path = "ledger/00000000.seg"
    at = disk.read_now(path, 0, None).index(entry.signature)
    disk.corrupt(path, at)
    with pytest.raises(StorageError, match="restore the ledger"):
        await first.read(2)
    disk.remove_now(path)
    with pytest.raises(StorageError, match="restore the ledger"):
        await first.read(0)


class Died(BaseException):
    """The machine lost its power."""


class FaultyDisk:
    """A disk whose n-th change fails, or is the last of this life: as ``faults`` says."""

    def __init__(self, disk: Any, faults: Mapping[int, str]) -> None:
        self._disk = disk
        self._faults = faults
        self._changes = itertools.count()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._disk, name)
        return (
            partial(self._change, real)
            if name in {"write", "append", "fsync", "replace"}
            else real
        )

    async def _change(self, real: Any, path: str, *rest: Any) -> None:
        fault = self._faults.get(next(self._changes), "")
        if fault == "power lost before":
            raise Died
        if fault == "refused":
            raise StorageError(fault)
        if fault == "half" and real.__name__ in {"write", "append"}:
            rest = (rest[0][: len(rest[0]) // 2], *rest[1:])
        await real(path, *rest)
        if fault == "power lost after":
            raise Died
        if fault:
            raise StorageError(fault)


FAULTS = ("refused", "half", "done, and refused", "power lost before", "power lost after")


def live_through(
    lives: Sequence[Mapping[int, str]], torn: int | None, segment_bytes: int
) -> None:
    """Append in each life what its faults allow; in the last one, which has none, all must be
    there.
    """

    async def main(simulation: Simulation) -> None:
        disk, acknowledged = SimDisk("node"), dict[int, bytes]()
        for life, faults in enumerate([*lives, {}]):
            world = SimWorld(simulation, "node", disk=disk, life=life)
            world.disk = FaultyDisk(world.disk, faults)  # type: ignore[assignment]
            ledger = Ledger(world, segment_bytes)
            try:
                await ledger.recover()
                for seqno, digest in acknowledged.items():
                    assert (await ledger.read(seqno)).digest == digest, (
                        "an acknowledged entry is another"
                    )
                for number in range(4):
                    with suppress(StorageError):
                        entry = await ledger.append("verdict", bytes([life, number]) * 20)
                        assert entry.seqno not in acknowledged, "a number was signed twice"
                        acknowledged[entry.seqno] = entry.digest
            except StorageError:
                assert faults, "a sound ledger was refused"
            except Died:
                pass
            disk.crash(None if torn is None else Random(torn))

    run_simulation(main, seed=1)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_any_write_loses_no_acknowledged_entry_and_signs_no_number_twice(
    fault: str,
) -> None:
    for change in range(16):
        live_through([{change: fault}], torn=1, segment_bytes=400)


def test_neither_do_faults_in_life_after_life() -> None:
    rng = Random(5)
    for _ in range(100):
        lives = [
            {rng.randrange(18): rng.choice(FAULTS) for _ in range(rng.randint(0, 3))}
            for _ in range(rng.randint(1, 4))
        ]
        live_through(lives, rng.choice((None, 1, 2, 3)), rng.choice((1, 400, 1 << 20)))
