"""Peer policy of every host, without I/O: whom it dials, talks to, refuses and keeps.

Theory of operation
-------------------
A host asks before it acts, and tells what came of it:

- *Before a dial*, `ConnectionGater.check_dial`: not to ourselves, and not to a peer that is
  refused; and `places_to_dial`: an address that failed twice in a row rests, longer each time.
  Which slots a dial takes is `is_sure`: whether the peer, or what we think of it,
  depends on a stranger's word.
- *After a dial that failed*, `dial_failed`: for five seconds messages to the peer are
  dropped at once (`may_send`). A caller that waits for its own `connect` is not held back: it
  has a reason, and a deadline. News of where the peer is, and a connection that it makes
  itself, end the back-off at once.
- *When a peer misbehaved*, `penalise` and `ban`, which say whether the host is to cut it off;
  from then on `is_refused` holds for both directions, whoever dials.
- *When room must be made*, `is_protected`.

Time comes as ``now``. `connector` and `sim.node.host` differ in how they dial and what they
count beside it; tests/conformance/test_hosts.py holds what both do with the answers.

What a host remembers of peers, without I/O: where to dial them, and how they behaved.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from p2p.bounded import BoundedDict
from p2p.errors import PeerUnreachable
from p2p.identity import PeerId
from p2p.multiaddr import AddrSource, Multiaddr
from p2p.swarm.core.limits import LOOPBACK, FadingCounts, group_of, reach_of

MAX_ADDRS: Final = 8
"""Most addresses kept per peer: two families, public and private, now and before the last
move."""
MAX_HEARSAY_ADDRS: Final = 4
"""Most hearsay addresses of a peer: two families, now and before the last move. A stranger
causes a dial with each."""
MAX_PEERS: Final = 10_000
"""Most peers whose addresses, or scores, are kept: the largest run that we simulate. Each takes
about 1 KiB. As many are kept on the owner's or the peers' signed word as on hearsay, so neither
pushes out the other."""
PENALTY_LIMIT: Final = 100.0
"""Points at which a peer is disconnected and refused. `p2p.offence` lists what costs how
many."""
PENALTY_HALF_LIFE: Final = 60.0
"""Seconds in which half of the points are forgotten, so that a bad minute does not follow a
peer for hours."""
REFUSAL: Final = 300.0
"""Seconds for which a peer that reached the limit is refused: five half-lives of its points."""

_Addrs = tuple[Multiaddr, ...]


class AddressBook:
    """Addresses where peers may be reached, newest first: a few per peer, for a bounded number
    of peers.

    It is one book for each `AddrSource`. Hearsay is kept apart from what the owner said and
    what members signed. So a stranger who names ten thousand peers pushes out only other
    hearsay, and first that in the network with the most peers. A peer that ``keeps`` accepts is
    pushed out only if the 16 oldest are all such.
    """

    def __init__(self, keeps: Callable[[PeerId], bool] = lambda _: False) -> None:
        self._keeps = keeps
        self._owner: dict[PeerId, _Addrs] = {}
        self._signed: dict[PeerId, _Addrs] = {}
        self._hearsay: dict[PeerId, _Addrs] = {}
        # of the hearsay, by network, where networks exist
        self._crowds: dict[str, dict[PeerId, None]] = {}

    def add(
        self, peer: PeerId, addrs: Sequence[Multiaddr], source: AddrSource = AddrSource.OWNER
    ) -> bool:
        """Remember addresses of a peer. Return True if one of them is new. Names are kept on
        the owner's word only."""
        if source is AddrSource.HEARSAY:
            return self._add_hearsay(peer, addrs)
        book = self._owner if source is AddrSource.OWNER else self._signed
        known = book.get(peer, ())
        places = _places if source is AddrSource.OWNER else _nameless_places
        fresh = places(peer, tuple(addrs))
        if fresh is known and len(book) < MAX_PEERS // 2:
            # Nearly every call brings nothing new. No peer has to be forgotten soon, so the
            # order in which they were heard of does not matter yet.
            return False
        both = _merged(fresh, known, MAX_ADDRS)
        book.pop(peer, None)
        if both:
            book[peer] = both
        if len(book) > MAX_PEERS:
            del book[self._to_go(book)]
        return any(addr not in known for addr in both)

    def _add_hearsay(self, peer: PeerId, addrs: Sequence[Multiaddr]) -> bool:
        known = self._hearsay.get(peer, ())
        fresh = _nameless_places(peer, tuple(addrs))
        if fresh == known and len(self._hearsay) < MAX_PEERS // 2:
            return False
        certain = {*self._owner.get(peer, ()), *self._signed.get(peer, ())}
        both = _merged(tuple(a for a in fresh if a not in certain), known, MAX_HEARSAY_ADDRS)
        self._forget_hearsay(peer)
        if both:
            self._hearsay[peer] = both
            group = group_of(both[0])
            if group.limited:
                crowd = self._crowds.setdefault(group.network, {})
                crowd[peer] = None
                # 312 of one network (/24, /48), which cannot push out the others.
                if len(crowd) > MAX_PEERS // 32:
                    self._forget_hearsay(self._to_go(crowd))
        if len(self._hearsay) > MAX_PEERS:
            largest = max(self._crowds.values(), key=len, default=None)
            crowded = largest is not None and len(largest) > 1
            self._forget_hearsay(self._to_go(largest if crowded and largest else self._hearsay))
        return any(addr not in known for addr in both)

    def _forget_hearsay(self, peer: PeerId) -> None:
        addrs = self._hearsay.pop(peer, ())
        if not addrs:
            return
        network = group_of(addrs[0]).network
        crowd = self._crowds.get(network)
        if crowd is not None:
            crowd.pop(peer, None)
            if not crowd:
                del self._crowds[network]

    def _to_go(self, book: dict[PeerId, _Addrs] | dict[PeerId, None]) -> PeerId:
        """Return the least recently used peer that may be forgotten."""
        oldest = itertools.islice(book, 16)  # enough to skip a dozen protected peers
        first = next(iter(book))
        return next((peer for peer in oldest if not self._keeps(peer)), first)

    def forget(self, peer: PeerId, addr: Multiaddr) -> None:
        """Forget an address at which another peer answers."""
        place = addr.transport
        for book in (self._owner, self._signed):
            if peer in book:
                book[peer] = tuple(known for known in book[peer] if known != place)
        left = tuple(known for known in self._hearsay.get(peer, ()) if known != place)
        if left != self._hearsay.get(peer, ()):
            self._forget_hearsay(peer)
            self._add_hearsay(peer, left)

    def of(self, peer: PeerId) -> _Addrs:
        """Return the addresses of ``peer``, surest and newest first, without ``/p2p/``."""
        return _merged(self.certain(peer), self._hearsay.get(peer, ()), MAX_ADDRS)

    def certain(self, peer: PeerId) -> _Addrs:
        """Return the addresses of ``peer`` by its own signed word or the owner's."""
        return _merged(self._signed.get(peer, ()), self._owner.get(peer, ()), MAX_ADDRS)

    def counts(self) -> dict[AddrSource, int]:
        """Return the number of remembered peers, by the source of their addresses."""
        books = (self._owner, self._signed, self._hearsay)
        return dict(zip(AddrSource, map(len, books), strict=True))


def _merged(fresh: _Addrs, known: _Addrs, limit: int) -> _Addrs:
    kept = tuple(addr for addr in known if addr not in fresh)
    return (*fresh, *kept)[:limit] if kept else fresh[:limit]


# Peers repeat the same list for hours; 4,096 lists are 1 MiB at most.
@functools.lru_cache(4096)
def _places(peer: PeerId, addrs: _Addrs) -> _Addrs:
    """Return the places of ``addrs`` of `peer`, at most `MAX_ADDRS`. All books that hold the
    same places share one tuple."""
    places = dict.fromkeys(addr.transport for addr in addrs if addr.peer_id in (None, peer))
    return tuple(places)[:MAX_ADDRS]


@functools.lru_cache(4096)
def _nameless_places(peer: PeerId, addrs: _Addrs) -> _Addrs:
    """Return the places that can be dialled without a name server. A stranger could make a name
    server slow, or watch it."""
    places = _places(peer, addrs)
    nameless = tuple([addr for addr in places if not addr.parts[0][0].startswith("dns")])
    return places if nameless == places else nameless


class Scores:
    """Keeps penalty points, which fade, refusals, which end, and bans, which do not.

    All three are bounded, and kept apart: an attacker that mints ten thousand identities to
    have its first forgotten must bring each of them to the limit itself, within the five
    minutes of a refusal.
    """

    def __init__(self) -> None:
        self.points: FadingCounts[PeerId] = FadingCounts(PENALTY_HALF_LIFE, MAX_PEERS)
        # all last equally long: the first in order ends first
        self._refused: BoundedDict[PeerId, float] = BoundedDict(MAX_PEERS)
        self._banned: BoundedDict[PeerId, None] = BoundedDict(MAX_PEERS)

    def penalise(self, peer: PeerId, points: float, now: float) -> bool:
        """Add ``points``. Return True if the peer should be disconnected and refused from now
        on."""
        if self.points.add(peer, now, points) < PENALTY_LIMIT:
            return False
        self._refused.renew(peer, now + REFUSAL)
        return True

    def ban(self, peer: PeerId) -> None:
        """Refuse ``peer`` for good."""
        self._banned[peer] = None

    def is_refused(self, peer: PeerId, now: float) -> bool:
        """Return True if connections to and from ``peer`` are unwelcome."""
        return peer in self._banned or now < self._refused.get(peer, -math.inf)


class ConnectionGater:
    """A host's knowledge of its peers: their addresses, their behaviour, and which of them the
    host wants."""

    def __init__(self, own: PeerId, is_connected: Callable[[PeerId], bool]) -> None:
        self.book = AddressBook(keeps=self._is_kept)
        self._own = own
        self._is_connected = is_connected
        self.scores = Scores()
        self._unreachable: dict[PeerId, float] = {}
        """Maps peers to the time until which they are not dialled for a message, oldest failure
        first."""
        self._failures: BoundedDict[tuple[PeerId, Multiaddr], tuple[int, float]] = BoundedDict(
            MAX_PEERS
        )
        """Maps addresses to their failures in a row, and the time until which they rest."""
        self._answered: BoundedDict[PeerId, Multiaddr] = BoundedDict(MAX_PEERS)
        """Maps peers to the address at which they last answered."""
        self._protected: dict[str, frozenset[PeerId]] = {}

    # Where peers are.

    def add_addrs(
        self,
        peer: PeerId,
        addrs: Sequence[Multiaddr],
        source: AddrSource,
        reach: int = LOOPBACK,
    ) -> None:
        """Remember addresses of ``peer``. New ones make an unreachable peer worth another dial.

        Of hearsay, only addresses are kept that can be reached from ``reach``
        (`limits.reach_of`) or further away.
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
        """Return the last known addresses of ``peer``, each ending in ``/p2p/`` and its id."""
        return tuple(addr.with_peer(peer) for addr in self.book.of(peer))

    def is_sure(self, peer: PeerId) -> bool:
        """Return True if a dial to ``peer`` is our own wish: the node wants to keep the peer,
        or has its address on the peer's own signed word or the owner's."""
        return self.is_protected(peer) or bool(self.book.certain(peer))

    def places_to_dial(self, peer: PeerId, now: float) -> tuple[Multiaddr, ...]:
        """Return the addresses of ``peer`` to dial now. The one that answered last comes first,
        and those behind a relay come last.

        Resting addresses are left out. If all rest, the one that rested longest is returned, so
        that a caller who wants the peer is not refused without a try.
        """
        known, answered = self.book.of(peer), self._answered.get(peer)
        if answered in known:
            known = (answered, *(addr for addr in known if addr != answered))
        known = tuple(sorted(known, key=lambda addr: addr.relay is not None))
        until = [self._failures.get((peer, addr), (0, now))[1] for addr in known]
        due = tuple(addr for addr, end in zip(known, until, strict=True) if end <= now)
        return due or tuple(known[until.index(end)] for end in sorted(until)[:1])

    def addr_failed(self, peer: PeerId, addr: Multiaddr, now: float) -> None:
        """Record that nobody, or another peer, answered at ``addr``. The address rests if this
        was not the first time in a row."""
        count = self._failures.get((peer, addr), (0, now))[0] + 1
        # Seconds for which an address rests after its second failure in a row; twice as long
        # after each further one. The first failure may have been chance, and a machine that
        # comes back is found within ten minutes.
        rest = min(10.0 * 2 ** min(count - 2, 16), 600.0) if count > 1 else 0.0
        self._failures.renew((peer, addr), (count, now + rest))
        if self._answered.get(peer) == addr:
            del self._answered[peer]

    def addr_answered(self, peer: PeerId, addr: Multiaddr) -> None:
        """Record that ``peer`` answered at ``addr``."""
        self._failures.pop((peer, addr), None)
        self._answered.renew(peer, addr)

    # Whether to dial.

    def check_dial(self, peer: PeerId, now: float) -> None:
        """Raise `PeerUnreachable` if ``peer`` must not be dialled at all."""
        if peer == self._own:
            raise PeerUnreachable("we do not dial ourselves")
        if self.scores.is_refused(peer, now):
            raise PeerUnreachable(f"{peer} is refused for what it did")

    def may_send(self, peer: PeerId, now: float) -> bool:
        """Return True if a message to ``peer``, which is not connected, is worth a dial."""
        return (
            peer != self._own
            and not self.scores.is_refused(peer, now)
            and not self._unreachable.get(peer, now) > now
        )

    def dial_failed(self, peer: PeerId, now: float, longer: float = 0.0) -> None:
        """Record that no address answered: dials for messages pause for five seconds plus
        ``longer``, since every service has a message each second."""
        for other in [other for other, until in self._unreachable.items() if until <= now]:
            del self._unreachable[other]
        self._unreachable[peer] = now + 5.0 + longer

    def connected(self, peer: PeerId) -> None:
        """Record a connection to ``peer``, which can therefore be reached."""
        self._unreachable.pop(peer, None)

    # Whom to refuse, and whom to keep.

    def protect(self, purpose: str, peers: Iterable[PeerId]) -> None:
        """Keep connections to `peers`, replacing those of the same ``purpose``."""
        self._protected[purpose] = frozenset(peers)

    def is_protected(self, peer: PeerId) -> bool:
        """Return True if the node keeps `peer` even when strangers fill it."""
        return any(peer in peers for peers in self._protected.values())

    def _is_kept(self, peer: PeerId) -> bool:
        return self._is_connected(peer) or self.is_protected(peer)
