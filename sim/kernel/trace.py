"""Trace of all events in order, as one hash.

Theory of operation
-------------------
Every event of a simulation is a small tuple of plain values. A thousand of them make a block; a
block is packed with msgpack, whose bytes are specified (the same on every Python), and fed to
one rolling BLAKE2b. The digest after each block is kept. Two runs are the same if the last
digests are; where they differ, the first differing block is known at once, and running both
again with that block kept (``keep``) names the first event that differs (`sim.run.diff`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Container
from typing import Final

from p2p.identity import PeerId
from p2p.wire import pack

BLOCK_EVENTS: Final = 1000
"""Events per block: fine enough to rerun cheaply, coarse enough that hashing costs under 1 µs
an event."""
DIGEST_BYTES: Final = 16
"""128 bits: two different traces have the same hash by chance in no sweep that can be run."""

TraceEntry = tuple[object, ...]
"""Time in nanoseconds, node, what, and details: ints, floats, str, bytes, bools, None."""


class Trace:
    """A rolling hash over everything that happened, and, where asked for, the events
    themselves."""

    def __init__(self, keep: Container[int] | None = None) -> None:
        """Begin an empty trace; ``keep`` holds the numbers of the blocks whose events are
        remembered (``EVERYTHING`` for all).
        """
        self._keep: Container[int] = keep if keep is not None else ()
        self._open: list[TraceEntry] = []
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._muted = False
        self.blocks: list[str] = []
        """The rolling digest after each whole block."""
        self.kept: list[TraceEntry] = []
        """The events of the blocks that were to be kept, in order."""

    def record(self, entry: TraceEntry) -> None:
        """Add an event: to the hash, and to `kept` if its block is to be kept."""
        self._open.append(entry)
        if len(self._open) >= BLOCK_EVENTS:
            self._close_block()

    def _close_block(self) -> None:
        if not self._muted:
            self._hash.update(pack(self._open))
            if len(self.blocks) in self._keep:
                self.kept.extend(self._open)
            self.blocks.append(self._hash.hexdigest())
        self._open.clear()

    def mute(self) -> None:
        """Ignore all later events: the run is over, and winding down is no part of it."""
        if not self._muted:
            if self._open:
                self._close_block()
            self._muted = True

    @property
    def digest(self) -> str:
        """The hash of all events so far."""
        if self._muted or not self._open:
            return self._hash.hexdigest()
        rolling = self._hash.copy()
        rolling.update(pack(self._open))
        return rolling.hexdigest()


class _Everything:
    """A container that holds every block number."""

    def __contains__(self, item: object) -> bool:
        return True


EVERYTHING: Final = _Everything()
"""Pass as ``keep`` to remember all events."""


_PLAIN: Final = (bool, int, float, str, bytes)
"""A tuple: a union would be made anew for each of many events."""


def plain(value: object) -> object:
    """Return ``value`` in a form that msgpack packs the same way in every process.

    Raises `TypeError` for an object whose text would hold its address, which differs from run
    to run.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, PeerId):
        return value.digest
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    text = repr(value)
    if " at 0x" in text:
        raise TypeError(
            f"{text} has no repr of its own: its address would differ from run to run"
        )
    return text
