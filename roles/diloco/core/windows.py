"""The windows of text that a member learns from: a permutation of all, dealt out by the record.

Theory of operation
-------------------
The corpus of a run is cut into windows, numbered from 0. All members walk one pseudo-random
permutation of the numbers, drawn from the run's seed. A record says how many windows all rounds
before have dealt out (`dealt`) and who the members are; the member of rank r gets the r-th part
of what this round deals. So parts are disjoint until the corpus is used up, each is a function
of (seed, record, member) alone, and a restarted member goes on at the very window where it was.

The permutation is a Feistel network of four rounds over the next even power of two; a number
that comes out beyond the corpus is put in again until it does not. It is integer arithmetic,
the same on all machines, and needs no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from p2p.identity import PeerId
from roles.diloco.core.messages import Record

_ROUNDS: Final = 4
"""Rounds of the Feistel network: four rounds of a good round function give a good permutation
(Luby and Rackoff).
"""
_MIX: Final = np.uint64(0xFF51AFD7ED558CCD)
"""A multiplier of MurmurHash's finalizer."""


def dealt(records: Sequence[Record], phase_windows: int) -> int:
    """Return the number of windows dealt out by the rounds that ``records`` close. The round
    that begins at the newest record is not counted."""
    return sum(len(record.members) for record in records[:-1]) * phase_windows


def part_of(record: Record, member: PeerId, before: int, phase_windows: int) -> int:
    """Return the first window of a member's part of the round after ``record``."""
    return before + record.members.index(member) * phase_windows


def windows(seed: int, first: int, count: int, total: int) -> NDArray[np.int64]:
    """Numbers of windows at ``first`` to ``first + count`` of the endless walk; a new
    permutation each time that all ``total`` are used up."""
    places = np.arange(first, first + count, dtype=np.uint64)
    laps = places // np.uint64(total)
    found = places % np.uint64(total)
    half = np.uint64(max(1, (max(1, total - 1).bit_length() + 1) // 2))
    keys = (laps + np.uint64(seed % 2**63)) * np.uint64(0x9E3779B97F4A7C15)
    found = _permuted(found, keys, half)
    while (beyond := found >= total).any():
        found[beyond] = _permuted(found[beyond], keys[beyond], half)
    return found.astype(np.int64)


def _permuted(
    numbers: NDArray[np.uint64], keys: NDArray[np.uint64], half: np.uint64
) -> NDArray[np.uint64]:
    low = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & low
    for turn in range(_ROUNDS):
        mixed = (right + keys + np.uint64(turn)) * _MIX
        mixed ^= mixed >> np.uint64(33)
        mixed *= _MIX
        left, right = right, left ^ ((mixed >> np.uint64(29)) & low)
    return (left << half) | right
