"""Whom a host dials, talks to, refuses and keeps: the peer policy of every host, without I/O.

Theory of operation
-------------------
A host asks before it acts, and tells what came of it:

- *Before a dial*, `ConnectionGater.check_dial`: not to ourselves, and not to a peer that is
  refused; and `places_to_dial`: an address that failed twice in a row rests, longer each time.
  Which slots a dial takes is `is_sure`: whether the peer, or what we think of it,
  depends on a stranger's word.
- *After a dial that failed*, `dial_failed`: for `DIAL_BACKOFF` seconds messages to the peer are
  dropped at once (`may_send`). A caller that waits for its own `connect` is not held back: it
  has a reason, and a deadline. News of where the peer is, and a connection that it makes
  itself, end the back-off at once.
- *When a peer misbehaved*, `penalise` and `ban`, which say whether the host is to cut it off;
  from then on `is_refused` holds for both directions, whoever dials.
- *When room must be made*, `is_protected`.

Time comes as ``now``. `connector` and `sim.node.host` differ in how they dial and what they
count beside it; tests/conformance/test_hosts.py holds what both do with the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from p2p.bounded import BoundedDict
from p2p.errors import PeerUnreachable
from p2p.identity import PeerId
from p2p.multiaddr import AddrSource, Multiaddr
from p2p.swarm.core.limits import LOOPBACK, reach_of
from p2p.swarm.core.peers import MAX_HEARSAY_ADDRS, MAX_PEERS, AddressBook, Scores

DIAL_BACKOFF: Final = 5.0
"""Seconds after a failed dial in which messages to the peer are dropped instead of dialling
again: every service has something to say each second. It ends when the peer dials us."""


REST: Final = 10.0
"""Seconds for which an address rests after its second failure in a row; twice as long after
each further one. The first failure may have been chance."""
MAX_REST: Final = 600.0
"""Seconds that an address rests at most: a machine that comes back is found within ten
minutes."""


class ConnectionGater:
    """A host's knowledge of its peers: their addresses, their behaviour, and which of them it
    wants."""

    __slots__ = (
        "_answered", "_failures", "_is_connected", "_own", "_protected", "_scores",
        "_unreachable", "book",
    )  # fmt: skip

    def __init__(self, own: PeerId, is_connected: Callable[[PeerId], bool]) -> None:
        self.book = AddressBook(keeps=self._is_kept)
        self._own = own
        self._is_connected = is_connected
        self._scores = Scores()
        self._unreachable: dict[PeerId, float] = {}
        """Until when a peer is not dialled for a message, oldest failure first."""
        self._failures: BoundedDict[tuple[PeerId, Multiaddr], tuple[int, float]] = BoundedDict(
            MAX_PEERS
        )
        """Failures in a row of an address, and until when it rests."""
        self._answered: BoundedDict[PeerId, Multiaddr] = BoundedDict(MAX_PEERS)
        """Where a peer answered last."""
        self._protected: dict[str, frozenset[PeerId]] = {}

    def __repr__(self) -> str:
        return f"ConnectionGater({self._own!r}, {len(self._unreachable)} unreachable)"

    # Where peers are.

    def add_addrs(
        self,
        peer: PeerId,
        addrs: Sequence[Multiaddr],
        source: AddrSource,
        reach: int = LOOPBACK,
    ) -> None:
        """Remember where ``peer`` may be dialled; news makes an unreachable peer worth a try.

        Of hearsay, only what can be reached from ``reach`` (`limits.reach_of`) or further
        away.
        """
        if peer == self._own:
            return
        if source is AddrSource.OWNER:
            for addr in addrs:
                self._failures.pop((peer, addr.transport), None)
        if source is AddrSource.HEARSAY:
            addrs = [addr for addr in addrs if reach_of(addr) >= reach][:MAX_HEARSAY_ADDRS]
        if self.book.add(peer, addrs, source):
            self._unreachable.pop(peer, None)
        if source is AddrSource.OWNER:  # who may name a relay by its DNS name
            for relay in [addr.relay for addr in addrs if addr.relay is not None]:
                if relay.peer_id is not None:
                    self.add_addrs(relay.peer_id, [relay], source)

    def addrs_of(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """The last known addresses of ``peer``, each ending in ``/p2p/`` and its id."""
        return tuple(addr.with_peer(peer) for addr in self.book.of(peer))

    def is_sure(self, peer: PeerId) -> bool:
        """Whether a dial to ``peer`` is our own wish: the node wants to keep it, or its address
        is its own signed word, or the owner's."""
        return self.is_protected(peer) or bool(self.book.certain(peer))

    def places_to_dial(self, peer: PeerId, now: float) -> tuple[Multiaddr, ...]:
        """Return the addresses of ``peer`` to dial now, where it answered last first, and
        those behind a relay last.

        Those that rest are left out, but for the one that rested longest if all do: a caller
        that wants the peer is not sent away without a try.
        """
        known, answered = self.book.of(peer), self._answered.get(peer)
        if answered in known:
            known = (answered, *(addr for addr in known if addr != answered))
        known = tuple(sorted(known, key=lambda addr: addr.relay is not None))
        until = [self._failures.get((peer, addr), (0, now))[1] for addr in known]
        due = tuple(addr for addr, end in zip(known, until, strict=True) if end <= now)
        return due or tuple(known[until.index(end)] for end in sorted(until)[:1])

    def addr_failed(self, peer: PeerId, addr: Multiaddr, now: float) -> None:
        """Nobody, or the wrong one, answered at ``addr``: it rests if that was not the first
        time in a row."""
        count = self._failures.get((peer, addr), (0, now))[0] + 1
        rest = min(REST * 2 ** min(count - 2, 16), MAX_REST) if count > 1 else 0.0
        self._failures.renew((peer, addr), (count, now + rest))
        if self._answered.get(peer) == addr:
            del self._answered[peer]

    def addr_answered(self, peer: PeerId, addr: Multiaddr) -> None:
        """``peer`` answered at ``addr``."""
        self._failures.pop((peer, addr), None)
        self._answered.renew(peer, addr)

    # Whether to dial.

    def check_dial(self, peer: PeerId, now: float) -> None:
        """Raise `PeerUnreachable` if ``peer`` is not to be dialled at all."""
        if peer == self._own:
            raise PeerUnreachable("we do not dial ourselves")
        if self._scores.is_refused(peer, now):
            raise PeerUnreachable(f"{peer} is refused for what it did")

    def may_send(self, peer: PeerId, now: float) -> bool:
        """Whether a message to ``peer``, to which there is no connection, is worth a dial."""
        return (
            peer != self._own
            and not self._scores.is_refused(peer, now)
            and not self._unreachable.get(peer, now) > now
        )

    def dial_failed(self, peer: PeerId, now: float, longer: float = 0.0) -> None:
        """No address answered: back off for `DIAL_BACKOFF` seconds, and ``longer``."""
        for other in [other for other, until in self._unreachable.items() if until <= now]:
            del self._unreachable[other]
        self._unreachable[peer] = now + DIAL_BACKOFF + longer

    def connected(self, peer: PeerId) -> None:
        """There is a connection to ``peer``: it can be reached."""
        self._unreachable.pop(peer, None)

    # Whom to refuse, and whom to keep.

    def penalise(self, peer: PeerId, points: float, now: float) -> bool:
        """Add penalty points; True if ``peer`` is to be cut off, and refused from now on."""
        return self._scores.penalise(peer, points, now)

    def ban(self, peer: PeerId) -> None:
        """Refuse for as long as this host lives; it is to be cut off."""
        self._scores.ban(peer)

    def is_refused(self, peer: PeerId, now: float) -> bool:
        """Whether we want nothing to do with ``peer`` for now."""
        return self._scores.is_refused(peer, now)

    def protect(self, purpose: str, peers: Iterable[PeerId]) -> None:
        """Keep connections to ``peers``; replaces what was protected for the same
        ``purpose``.
        """
        self._protected[purpose] = frozenset(peers)

    def is_protected(self, peer: PeerId) -> bool:
        """Whether the node keeps ``peer`` whatever strangers do."""
        return any(peer in peers for peers in self._protected.values())

    def _is_kept(self, peer: PeerId) -> bool:
        return self._is_connected(peer) or self.is_protected(peer)
