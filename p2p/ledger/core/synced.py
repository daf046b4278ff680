"""Up to where a ledger is on the disk: a file beside the segments, to tell torn ends from rot.

Theory of operation
-------------------
A crash may leave half a record at the end of the newest segment, and that half must be cut off:
its entry was never acknowledged. A disk that decays leaves the same picture, and there a cut
would be fatal: the entries were acknowledged, and the next one signs their number a second
time. So after the fsync of the segment, and before `Ledger.append` returns, one of two *slots*
says how far the log goes now: segment, bytes, head. What is no record below that is rot,
whatever it looks like; only what lies behind it may be torn.

The slots are written in turn, each in a sector of its own: a write that power cuts off leaves
the other. As a slot is written only when the segment is on the disk, a void slot and a torn
record never come of one crash.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from p2p.ledger.core.chain import CHECKSUM_BYTES, DIGEST_BYTES, EMPTY, Head, checksum
from p2p.wire import KI

SLOT_BYTES: Final = 4 * KI
"""Distance between the slots: the largest sector of any disk, so that no write touches both."""
MAX_SYNCED: Final = 2 * SLOT_BYTES
"""Bytes of the file at most."""
_FIELDS: Final = struct.Struct(f">8sQQQq{DIGEST_BYTES}s")
_MAGIC: Final = b"shoal/l2"


@dataclass(frozen=True, slots=True)
class Synced:
    """``size`` bytes of segment number ``segment`` are on the disk, and everything before: up
    to ``head``.
    """

    turn: int
    """Counts the writes; the slot with the higher one is the newer."""
    segment: int
    size: int
    head: Head

    @property
    def offset(self) -> int:
        """Where its slot is in the file."""
        return self.turn % 2 * SLOT_BYTES

    def encode(self) -> bytes:
        """The bytes of its slot."""
        fields = _FIELDS.pack(
            _MAGIC, self.turn, self.segment, self.size, self.head.seqno, self.head.digest
        )
        return fields + checksum(fields)


NOTHING: Final = Synced(0, 0, 0, EMPTY)
"""The state of a ledger without entries."""


def encode_slots(synced: Synced) -> tuple[Synced, bytes]:
    """The file with ``synced`` in both slots, and the newer of them."""
    even = Synced(synced.turn + synced.turn % 2, synced.segment, synced.size, synced.head)
    odd = Synced(even.turn + 1, synced.segment, synced.size, synced.head)
    return odd, even.encode().ljust(SLOT_BYTES, b"\0") + odd.encode()


def read_slots(data: bytes) -> tuple[Synced | None, bool]:
    """The newer of the slots that are sound, and whether both are. Never raises."""
    found = [
        slot for offset in (0, SLOT_BYTES) if (slot := _read_slot(data, offset)) is not None
    ]
    return max(found, key=lambda slot: slot.turn, default=None), len(found) == 2


def torn_slots(data: bytes) -> list[int]:
    """Where those begin that are not sound."""
    return [offset for offset in (0, SLOT_BYTES) if _read_slot(data, offset) is None]


def _read_slot(data: bytes, offset: int) -> Synced | None:
    fields = data[offset : offset + _FIELDS.size]
    end = offset + _FIELDS.size + CHECKSUM_BYTES
    if len(data) < end or data[end - CHECKSUM_BYTES : end] != checksum(fields):
        return None
    magic, turn, segment, size, seqno, digest = _FIELDS.unpack(fields)
    slot = Synced(turn, segment, size, Head(seqno, digest))
    return slot if magic == _MAGIC and slot.offset == offset else None
