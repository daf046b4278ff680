"""Who behaves: quotas, promises, demerits and credit of the connected peers.

What a peer may cost us
-----------------------
Each connected peer has an account of *units*. One unit is a byte that it sends, or 50 ns of our time on the
slower of the machines that we measured: an RPC costs `RPC_COST` besides its bytes, each protobuf field in it
`FIELD_COST`, a signature to verify `VERIFY_COST`, a message that was no news `IGNORED_COST`, a message that
we send on request its bytes. The account fills by ``rate`` a second up to ``burst``; a peer whose account
is overdrawn has its RPCs dropped unread. With the defaults (256 Ki a second, 4 Mi at once) a peer takes at
most 13 ms of each second, 1.3 % of a core, and 0.2 s at once; a stranger that has just come 0.05 s at once.
For long it may send 2,000 empty RPCs, have 128 signatures verified, or be answered 256 KiB, in each second.

Many peers together could still take it all. When more than `CROWD` accounts are overdrawn, all of them share
what 16 may spend: 4 MiB a second, 21 % of a core, however many they are. An honest peer that sends a few KiB
a second has its burst for ten minutes of that, and is not one of them.

Dropping an RPC costs about a microsecond here, and what the host's reading of it costs. So a peer that goes
on is blamed: for each 8 MiB (two bursts) that were dropped beyond what the account could have paid for, and
for each 15 intervals in a row in which something was dropped. The fourth blame within a minute disconnects:
after 262,000 empty RPCs, 3 s at 98,000 a second, or after a minute or two of a little too much.

No honest peer is blamed for what waited while *we* were stopped (SIGSTOP, a laptop's lid): what waits for us
is at most the peer's outbox of 4 MiB and what lies in windows and kernels, which a burst and the 8 MiB cover,
with the price of each RPC. And for some seconds after our own clock has jumped nothing of this kind is held
against any peer (`GossipCore.handle`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from p2p.gossip.core.events import GossipConfig
from p2p.identity import PeerId
from p2p.wire import KI, MIB

RPC_COST: Final = 128
"""Units of an RPC besides its bytes: 6 µs to decode, carry out and answer an empty one."""
FIELD_COST: Final = 32
"""Units of each protobuf field: 1.6 µs to decode, check and look up an id, a topic or part of a message."""
VERIFY_COST: Final = 2 * KI
"""Units of a signature: 60 to 120 µs."""
IGNORED_COST: Final = 16 * KI
"""Units of a message that the validator ignores: 16 a second for long, 64 at once by a newcomer.

What is no news to us may be news to others, so IGNORE is no lie: an honest node forwards what it accepted,
and may know an author whom we do not know yet (a later epoch of the run file), or be a version behind. A
rejection would make honest nodes blame each other for that. But every stranger can sign messages by the
million that we ignore. So the peer that brings them pays: more than an honest one needs (a policy or two a
minute by authors that we do not know), and too little to fill a table."""
NEWCOMER: Final = MIB
"""Units that a peer has when it connects: names cost nothing, so a new one is not worth a whole burst."""
FLOOD_BURSTS: Final = 2.0
"""Bursts dropped over quota from which it is a flood, and not what waited for a stopped process."""
PATIENCE: Final = 15
"""Intervals in a row over quota from which it is no accident: a burst and 15 s of the rate are 8 MiB."""
CROWD: Final = 16
"""Peers that may be overdrawn at a time before they share: more than a mesh has, 21 % of a core."""
AUTHOR_SHARE: Final = 0.5
"""What an author may say, as a part of what a peer may send. Honest peers forward all that they accept of
an author: without a limit on the author they would be over quota for its sake."""
MAX_AUTHORS: Final = 1024
"""Authors whose messages were accepted, and their accounts: as many as a run admits to a topic."""
MAX_LEFT: Final = 1024
"""Accounts kept of peers that left: who comes back finds its own, until 1,024 others have left."""

FORGED_POINTS: Final = 25.0
MALFORMED_POINTS: Final = 25.0
REJECTED_POINTS: Final = 10.0
GRAFT_POINTS: Final = 2.0
BROKEN_PROMISE_POINTS: Final = 2.0
FLOOD_POINTS: Final = 25.0
"""Points of penalty. Four forgeries are an enemy; a broken promise may be bad luck."""
BAD: Final = 10.0
"""Demerits from which a peer is kept out of the mesh: one rejected message, for a while."""
INCREDIBLE: Final = 40.0
"""Demerits from which its ids and its questions are ignored."""
FADING: Final = 0.97
"""What is left of demerits after an interval: half of them are gone in 23."""
MAX_BLAMED: Final = 4096
"""Peers with demerits. They outlive a connection, or a new one would wash them off; when there are too many
the least is forgotten, so that 4,096 new names wash off only what is less than theirs."""

MAX_ASKED: Final = 128
"""Ids asked of one peer in an interval: far more than a run publishes, and half of what fits one RPC."""
MAX_PROMISES: Final = 8192
"""Ids asked for that did not come yet, over all peers: 16 peers that never answer fill it (128 ids in each of
4 intervals). From then on each new promise pushes out one of the peer that has most."""
MAX_ASKED_OF: Final = 8
"""Peers asked for one id that never brought us anything; those that did are asked besides. An attacker
that tells us of ids it will not send cannot keep us from asking others."""
MAX_CREDIT: Final = 100.0
"""What a peer can have earned, one for each message that it brought first and that was accepted."""
CREDIT_FADING: Final = 0.998
"""What is left of it after an interval: half of it is gone in 346, so that a run that publishes once in some
minutes still tells peers that bring policies from peers that bring nothing."""


@dataclass(slots=True)
class _Account:
    """What one connected peer may still do, has promised, and has done for us."""

    left: float
    at: float
    dropped: float = 0.0
    refused: bool = False
    over: int = 0
    asked: int = 0
    credit: float = 0.0
    promises: dict[bytes, float] = field(default_factory=dict)

    def refill(self, now: float, rate: float, burst: float) -> None:
        """Time has gone by."""
        gain = (now - self.at) * rate
        self.at = now
        self.left = min(burst, self.left + gain)
        if self.dropped:
            self.dropped = max(0.0, self.dropped - gain)


@dataclass(slots=True)
class _Ask:
    """Whom we asked for an id, and until when no other peer is asked."""

    peers: list[PeerId] = field(default_factory=list)
    until: float = 0.0


class Manners:
    """What each peer may still do, and what is held against it."""

    def __init__(self, config: GossipConfig) -> None:
        self._config = config
        self._accounts: dict[PeerId, _Account] = {}
        self._left: dict[PeerId, _Account] = {}
        self._authors: dict[PeerId, _Account] = {}
        self._demerits: dict[PeerId, float] = {}
        self._asks: dict[bytes, _Ask] = {}
        self._promises = 0
        self._rate = config.rate

    def connected(self, peer: PeerId, now: float) -> None:
        """Open an account, or go on with that of the last connection."""
        if peer not in self._accounts:
            fresh = _Account(min(self._config.burst, NEWCOMER), now)
            self._accounts[peer] = self._left.pop(peer, fresh)

    def disconnected(self, peer: PeerId) -> None:
        """It is gone; its promises are void, its demerits stay."""
        account = self._accounts.pop(peer, None)
        if account is None:
            return
        for identity in list(account.promises):
            self._drop_promise(account, identity, peer)
        account.credit = 0.0
        self._left[peer] = account
        if len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]

    # Demerits and credit.

    def score(self, peer: PeerId) -> float:
        """Higher is better; 0 if nothing is held against it."""
        return -self._demerits.get(peer, 0.0)

    def is_good(self, peer: PeerId) -> bool:
        """Whether it may be a mesh peer."""
        return self._demerits.get(peer, 0.0) < BAD

    def is_credible(self, peer: PeerId) -> bool:
        """Whether its ids and questions are worth an answer."""
        return self._demerits.get(peer, 0.0) < INCREDIBLE

    def blame(self, peer: PeerId, points: float) -> None:
        """Hold something against it."""
        if peer not in self._demerits and len(self._demerits) >= MAX_BLAMED:
            del self._demerits[min(self._demerits, key=self._demerits.__getitem__)]
        self._demerits[peer] = self._demerits.get(peer, 0.0) + points

    def earn(self, peer: PeerId) -> None:
        """It brought news before any other peer did."""
        account = self._accounts.get(peer)
        if account is not None:
            account.credit = min(MAX_CREDIT, account.credit + 1)

    def credit(self, peer: PeerId) -> float:
        """What it has earned."""
        account = self._accounts.get(peer)
        return account.credit if account is not None else 0.0

    # Quotas.

    def may_send(self, peer: PeerId, size: int, now: float) -> bool:
        """Take an RPC of ``size`` bytes from its account, unless that is overdrawn."""
        account = self._accounts[peer]
        account.refill(now, self._rate, self._config.burst)
        if account.left > 0:
            account.left -= RPC_COST + size
            return True
        account.dropped += RPC_COST + size
        account.refused = True
        return False

    def charge(self, peer: PeerId, units: float) -> None:
        """Take what was spent on it already."""
        account = self._accounts.get(peer)
        if account is not None:
            account.left -= units

    def is_overdrawn(self, peer: PeerId) -> bool:
        """Whether nothing more is to be done for it now."""
        account = self._accounts.get(peer)
        return account is None or account.left <= 0

    def is_flooding(self, peer: PeerId) -> bool:
        """Whether so much was dropped that it is to be blamed; counting begins again."""
        account = self._accounts[peer]
        flooding = account.dropped >= FLOOD_BURSTS * self._config.burst
        if flooding:
            account.dropped = 0.0
        return flooding

    def persistent(self) -> list[PeerId]:
        """The peers that were over quota in each of the last `PATIENCE` intervals; counting begins again.

        To be asked once an interval. More than a crowd of such peers share what a crowd may spend.
        """
        flooding, crowd = [], 0
        for peer, account in self._accounts.items():
            account.over = account.over + 1 if account.refused else 0
            crowd += account.refused
            account.refused = False
            if account.over >= PATIENCE:
                account.over = 0
                flooding.append(peer)
        self._rate = self._config.rate * min(1.0, CROWD / max(1, crowd))
        return flooding

    def author_may(self, author: PeerId, now: float) -> bool:
        """Whether an author's quota allows for another message. Only what was accepted counts: without an
        admission to the topic its messages are on the account of the peers that bring them."""
        account = self._authors.get(author)
        if account is None:
            return True
        account.refill(now, AUTHOR_SHARE * self._config.rate, AUTHOR_SHARE * self._config.burst)
        return account.left > 0

    def charge_author(self, author: PeerId, size: int, now: float) -> None:
        """A message of ``size`` bytes was accepted."""
        account = self._authors.get(author)
        if account is None:
            if len(self._authors) >= MAX_AUTHORS:
                del self._authors[next(iter(self._authors))]
            account = self._authors[author] = _Account(AUTHOR_SHARE * self._config.burst, now)
        account.left -= RPC_COST + VERIFY_COST + size

    # Promises.

    def may_ask(self, peer: PeerId) -> int:
        """How many ids it may be asked for in this interval."""
        return MAX_ASKED - self._accounts[peer].asked

    def should_ask(self, identity: bytes, peer: PeerId, now: float) -> bool:
        """Whether ``peer``, which says that it has this, is to be asked although others were.

        A peer that brought us news before is left an interval to answer; what others promise is worth
        nothing, so several are asked, and still those that have earned credit.
        """
        ask = self._asks.get(identity)
        if ask is None:
            return True
        if peer in ask.peers or now < ask.until:
            return False
        return len(ask.peers) < MAX_ASKED_OF or self._accounts[peer].credit > 0

    def ask(self, identity: bytes, peer: PeerId, now: float) -> bool:
        """Note that ``peer`` is asked for this; False if it holds too many promises already."""
        account = self._accounts[peer]
        if self._promises >= MAX_PROMISES:
            most = max(self._accounts, key=lambda each: len(self._accounts[each].promises))
            if most == peer:
                return False
            holder = self._accounts[most]
            self._drop_promise(holder, next(iter(holder.promises)), most)
        account.asked += 1
        account.promises[identity] = now + self._config.promise
        self._promises += 1
        ask = self._asks.setdefault(identity, _Ask())
        ask.peers.append(peer)
        if account.credit > 0:
            ask.until = now + self._config.interval
        return True

    def kept(self, identity: bytes) -> None:
        """It came, from this peer or another."""
        ask = self._asks.get(identity)
        for peer in list(ask.peers) if ask is not None else ():
            self._drop_promise(self._accounts[peer], identity, peer)

    def broken_promises(self, now: float) -> list[PeerId]:
        """The peers whose messages did not come in time, each once."""
        broken = []
        for peer, account in self._accounts.items():
            late = [identity for identity, until in account.promises.items() if until <= now]
            for identity in late:
                self._drop_promise(account, identity, peer)
            if late:
                broken.append(peer)
        return broken

    def _drop_promise(self, account: _Account, identity: bytes, peer: PeerId) -> None:
        del account.promises[identity]
        self._promises -= 1
        ask = self._asks[identity]
        ask.peers.remove(peer)
        if not ask.peers:
            del self._asks[identity]

    def fade(self) -> None:
        """An interval has gone by: forgive a little, and let every peer be asked again."""
        faded = {peer: points * FADING for peer, points in self._demerits.items()}
        self._demerits = {peer: points for peer, points in faded.items() if points >= 0.1}
        for account in self._accounts.values():
            account.asked = 0
            account.credit *= CREDIT_FADING
