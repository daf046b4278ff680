"""Quotas of bandwidth and CPU time of each peer, counted before decoding.

Units
-----
Each connected peer has a token bucket of *units*. One unit is a byte that it sends, or 50 ns of
our time on the slower of the machines that were measured: an RPC costs `RPC_COST` besides its
bytes, each protobuf field in it `FIELD_COST`, a signature to verify `VERIFY_COST`, a message
that the validator ignored `IGNORED_COST`, a message that we send on IWANT its bytes. The bucket
fills by `RATE` a second up to `BURST`; while it is empty the peer's RPCs are dropped
undecoded.

With the defaults (256 Ki a second, 4 Mi at once) one peer takes at most 13 ms of each second,
1.3 % of a core, and 0.2 s at once; a newcomer 0.05 s at once. For long it may send 2,000 empty
RPCs, have 128 signatures verified, or be answered 256 KiB, in each second.

Many peers together
-------------------
A thousand peers that each stay at their quota would still take every core. When more than
16 peers were over quota in the last interval, all peers share what 16 may spend: 4 MiB a
second, 21 % of a core, however many they are. An honest peer that sends a few KiB a second
lives for ten minutes on its burst alone, and is not one of them.

When dropping is not enough
---------------------------
Dropping an RPC costs about a microsecond here, and besides that what the host's reading of it
costs. So a peer that goes on is penalised: for each 8 MiB dropped beyond what the bucket could
have paid for, and for each 15 intervals in a row in which something was dropped. The fourth
penalty within a minute disconnects: after 262,000 empty RPCs, 3 s at 98,000 a second, or after
a minute or two of a little too much.

No honest peer is penalised for what waited while *our* process was stopped (SIGSTOP, a laptop's
lid): at most the peer's outbox of 4 MiB and what lies in windows and kernels, which a burst and
the 8 MiB cover, with the price of each RPC. And for some seconds after our own clock has jumped
no flood is penalised at all (`GossipCore.handle`).
"""

from __future__ import annotations

from typing import Final

from p2p.bounded import BoundedDict, KeyedQuotas, TokenBucket
from p2p.gossip.config import BURST, RATE
from p2p.identity import PeerId
from p2p.wire import KI, MIB

RPC_COST: Final = 128
"""Units that an RPC costs besides its bytes: 6 µs to decode, process and answer an empty
one."""
FIELD_COST: Final = 32
"""Units that each protobuf field costs: 1.6 µs to decode, check and look up an id, a topic or a
part of a message."""
VERIFY_COST: Final = 2 * KI
"""Units that verifying a signature costs: 60 to 120 µs."""
IGNORED_COST: Final = 16 * KI
"""Units that an ignored message costs the peer that brings it, which allows 16 a second in the
long run and 64 at once. Bringing one is no offence, since an honest forwarder may know a later
run file; but a stranger can sign such messages by the million."""
NEWCOMER: Final = MIB
"""Units that a peer has when it connects. Names cost nothing, so a new one does not get a whole
burst."""


class _Account(TokenBucket):
    """Bucket of one peer, with a count of the bytes dropped while it was empty."""

    __slots__ = ("_dropped", "_intervals_over", "_over")

    def __init__(self, now: float) -> None:
        super().__init__(BURST, now, NEWCOMER)
        self._dropped = 0.0
        self._over = False
        self._intervals_over = 0

    def pay(self, cost: float, now: float, rate: float) -> bool:
        """Take ``cost`` and return True, or count it as dropped if the bucket is empty. Dropped
        units are forgiven as fast as the bucket fills."""
        gain = self.refill(now, rate)
        if self._dropped:
            self._dropped = max(0.0, self._dropped - gain)
        if self.level > 0:
            self.level -= cost
            return True
        self._dropped += cost
        self._over = True
        return False

    def take_flood(self) -> bool:
        """Return True and reset the count if so much was dropped that the peer counts as
        flooding. Less than two bursts may only have waited while our process was stopped."""
        if self._dropped < 2 * BURST:
            return False
        self._dropped = 0.0
        return True

    def end_interval(self) -> tuple[bool, bool]:
        """End an interval. Return whether the peer was over quota in it, and whether it was
        over quota in each of the last 15 intervals, or 30, 45 ..."""
        was_over, self._over = self._over, False
        self._intervals_over = self._intervals_over + 1 if was_over else 0
        # Number of consecutive intervals over quota after which a peer is penalised. A burst of
        # 4 MiB and 15 s at 256 KiB/s are 8 MiB, as much as `take_flood` allows at once.
        return was_over, was_over and self._intervals_over % 15 == 0


class PeerQuotas:
    """Buckets of connected peers, of peers that left, and of authors."""

    def __init__(self) -> None:
        self._accounts: dict[PeerId, _Account] = {}
        # Accounts kept of peers that left. One that comes back finds its own bucket, so that
        # reconnecting fills none, until 1,024 others have left.
        self._departed: BoundedDict[PeerId, _Account] = BoundedDict(1024)
        self.authors = KeyedQuotas(RATE / 2, BURST / 2)
        """Quotas of authors, charged for accepted messages. Unaccepted ones are charged to the
        peers that bring them. An author has half of what a peer has: honest peers forward
        everything that they accept from it, and would otherwise be over quota because of
        it."""
        self._rate = RATE

    def connected(self, peer: PeerId, now: float) -> None:
        """Open an account for ``peer``, or continue that of its last connection."""
        if peer not in self._accounts:
            known = self._departed.pop(peer, None)
            self._accounts[peer] = known or _Account(now)

    def disconnected(self, peer: PeerId) -> None:
        """Keep the account of a peer that left in case it returns."""
        account = self._accounts.pop(peer, None)
        if account is not None:
            self._departed[peer] = account

    def admit(self, peer: PeerId, size: int, now: float) -> bool:
        """Charge an RPC of ``size`` bytes. Return False if the bucket is empty and the RPC must
        be dropped."""
        return self._accounts[peer].pay(RPC_COST + size, now, self._rate)

    def charge(self, peer: PeerId, units: float) -> None:
        """Charge ``peer`` for work already done; the bucket may become negative."""
        account = self._accounts.get(peer)
        if account is not None:
            account.take(units)

    def take_flood(self, peer: PeerId) -> bool:
        """Return True if ``peer`` is to be penalised for what was dropped."""
        return self._accounts[peer].take_flood()

    def heartbeat(self) -> list[PeerId]:
        """Begin the next interval and return the peers to penalise, which were over quota in
        each of the last 15 intervals. Lower the rate of all peers for the next interval
        if more than 16 were over quota."""
        ended = {peer: account.end_interval() for peer, account in self._accounts.items()}
        crowd = sum(was_over for was_over, _ in ended.values())
        # Number of peers over quota at the same time above which all peers share a budget. It
        # is more than a mesh has; 16 peers at 1.3 % take 21 % of a core.
        self._rate = RATE * min(1.0, 16 / max(1, crowd))
        return [peer for peer, (_, has_persisted) in ended.items() if has_persisted]
