"""How much work the trainer still wants under a policy, and whose turn it is to do it.

The trainer says a *share*: how many places of its draw order each worker is to fill under that
policy. A share of 2.25 is two places from everyone, and a third from a quarter of them: those
whose *lot* is below 0.25. The lot follows from the run, the node and the digest of the policy,
so that nobody chooses it, or knows it before the policy is out; trainer, worker and validator
compute the same. A worker that fills more places than its share is asked for none of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from p2p.bounded import BoundedDict
from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from roles.protocol.core.messages import MAX_INDEX, Commitment

UNIT: Final = 1 << 16
"""Parts of a place that a share is counted in: a swarm of 60,000 can be asked for one."""
MAX_SHARE: Final = UNIT * 65_535
"""More places than any node fills under one policy: all that it can make."""
MAX_GROUPS_WANTED: Final = 1 << 32
"""A step has a million groups at most (`roles.rl.recipe`), of which one in 4,000 teaches."""
MAX_NUMBER: Final = 2**53
"""Statements are numbered by the trainer's clock, in milliseconds: as far as 285,000 years."""
KEPT: Final = 16
"""Policies whose shares are remembered: more than lag, and those that come before a worker has
heard of them."""
NOT_WANTED: Final = "not wanted now"
"""Beginning of what a validator answers to work beyond its node's share: the worker asks again
when the trainer has said something else."""
_DOMAIN: Final = b"/shoal/demand/1.0.0"


def demand_topic(run: bytes) -> str:
    """The gossip topic on which a run's trainer says what it wants."""
    return f"/shoal/run/{run.hex()}/demand"


@dataclass(frozen=True, slots=True)
class Demand:
    """What the trainer wants under one policy; the message is signed by gossip."""

    version: PolicyVersion
    number: int
    """Of two statements about one version, the higher holds."""
    share: int
    """Places from each worker, in parts of `UNIT`."""
    groups: int
    """How many groups it still wants, of all workers together: for people."""

    def to_bytes(self) -> bytes:
        """The wire form."""
        return pack([self.version, self.number, self.share, self.groups])

    def __str__(self) -> str:
        each = "all" if self.share == MAX_SHARE else f"{self.share / UNIT:.2f}"
        return (
            f"the trainer wants {self.groups:,} more groups under policy {self.version}, "
            f"{each} submissions of each worker"
        )


def decode_demand_untrusted(data: bytes) -> Demand:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    numbers = fields_untrusted(unpack_untrusted(data), int, int, int, int, what="demand")
    limits = (MAX_INDEX, MAX_NUMBER, MAX_SHARE, MAX_GROUPS_WANTED)
    if any(not 0 <= one <= limit for one, limit in zip(numbers, limits, strict=True)):
        raise BadMessage("a number of a demand is out of range")
    version, number, share, groups = numbers
    return Demand(PolicyVersion(version), number, share, groups)


def lot_of(run: bytes, node: PeerId, policy: bytes) -> int:
    """The node's lot under the policy with this digest, from 0 to `UNIT` - 1."""
    drawn = hashlib.sha256(b"".join((_DOMAIN, run, node.digest, policy))).digest()
    return int.from_bytes(drawn[:8], "big") % UNIT


def is_within(share: int, lot: int, index: int) -> bool:
    """Whether the place ``index`` of a node with this lot is among those asked for."""
    return index * UNIT + lot < share


def share_for(places: int, lots: Iterable[int]) -> int:
    """The share by which workers with these ``lots`` are asked for ``places`` in all."""
    ordered = sorted(lots)
    if not ordered or places <= 0:
        return MAX_SHARE if places > 0 else 0
    each, more = divmod(places, len(ordered))
    share = each * UNIT + (ordered[more - 1] + 1 if more else 0)
    return min(share, MAX_SHARE)


class HeardShares:
    """What a worker or a validator has heard of the trainer, by policy."""

    def __init__(self, run: bytes) -> None:
        self._run = run
        self._newest: Demand | None = None
        self._reached = (-1, -1)
        """Version and number of the newest statement, though it holds no longer."""
        self._shares: BoundedDict[PolicyVersion, tuple[int, int]] = BoundedDict(KEPT)
        """By version: the share that holds, and the largest that was ever said."""

    @property
    def newest(self) -> Demand | None:
        """The last statement; None before the first, and when it holds no longer."""
        return self._newest

    def lapse(self) -> None:
        """What was said holds no longer. A recording of it is no news for all that."""
        self._newest = None
        self._shares = BoundedDict(KEPT)

    def hear(self, demand: Demand) -> bool:
        """Whether it is news."""
        if self._reached >= (demand.version, demand.number):
            return False
        self._newest, self._reached = demand, (demand.version, demand.number)
        most = max(demand.share, self._shares.get(demand.version, (0, 0))[1])
        self._shares[demand.version] = demand.share, most
        return True

    def asks_for(
        self, node: PeerId, version: PolicyVersion, policy: bytes, index: int
    ) -> bool | None:
        """Whether the node is asked to fill this place; None if nothing is known."""
        share = self._shares.get(version)
        if share is None:
            return None
        return is_within(share[0], lot_of(self._run, node, policy), index)

    def asked_for(self, commitment: Commitment) -> bool:
        """Whether this place was asked for at some time, as far as is known: a share that has
        shrunk refuses no work that was begun before."""
        share = self._shares.get(commitment.version)
        lot = lot_of(self._run, commitment.node, commitment.policy)
        return share is None or is_within(share[1], lot, commitment.index)
