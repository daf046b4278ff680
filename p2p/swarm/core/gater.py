"""Whom a host dials, talks to, refuses and keeps: the peer policy of every host, without I/O.

Theory of operation
-------------------
A host asks before it acts, and tells what came of it:

- *Before a dial*, `ConnectionGater.check_dial`: not to ourselves, and not to a peer that is
  refused. Which slots a dial takes is `is_sure`: whether the peer, or what we think of it,
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

from p2p.errors import PeerUnreachable
from p2p.identity import PeerId
from p2p.multiaddr import AddrSource, Multiaddr
from p2p.swarm.core.limits import LOOPBACK, reach_of
from p2p.swarm.core.peers import MAX_HEARSAY_ADDRS, AddressBook, Scores

DIAL_BACKOFF: Final = 5.0
"""Seconds after a failed dial in which messages to the peer are dropped at once instead of
dialling again.

Membership, gossip and the DHT each have something to say to a peer every second or so, and
each would dial anew: a peer that is gone, known at 8 addresses, would cost 8 handshakes a
second. With 5 s it costs 1.6, and a peer that restarts is missed for 5 s at most, or until it
dials us."""


class ConnectionGater:
    """What one host thinks of peers: where they are, how they behaved, which it wants."""

    __slots__ = ("_is_connected", "_own", "_protected", "_scores", "_unreachable", "book")

    def __init__(self, own: PeerId, is_connected: Callable[[PeerId], bool]) -> None:
        self.book = AddressBook(keeps=self._is_kept)
        self._own = own
        self._is_connected = is_connected
        self._scores = Scores()
        self._unreachable: dict[PeerId, float] = {}
        """Until when a peer is not dialled for a message, oldest failure first."""
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
        if source is AddrSource.HEARSAY:
            addrs = [addr for addr in addrs if reach_of(addr) >= reach][:MAX_HEARSAY_ADDRS]
        if self.book.add(peer, addrs, source):
            self._unreachable.pop(peer, None)

    def addrs_of(self, peer: PeerId) -> tuple[Multiaddr, ...]:
        """Where ``peer`` was last said to be, each address ending in ``/p2p/`` and its id."""
        return tuple(addr.with_peer(peer) for addr in self.book.of(peer))

    def is_sure(self, peer: PeerId) -> bool:
        """Whether a dial to ``peer`` is our own wish: the node wants to keep it, or its address
        is its own signed word, or the owner's."""
        return self.is_protected(peer) or bool(self.book.certain(peer))

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
        """Whether the node wants to keep ``peer``, whatever strangers do."""
        return any(peer in peers for peers in self._protected.values())

    def _is_kept(self, peer: PeerId) -> bool:
        return self._is_connected(peer) or self.is_protected(peer)
