"""How an origin gives a version away: every chunk once, each to a root that has credit.

Theory of operation
-------------------
BitTorrent's name for it is super-seeding: the origin gives each chunk to one peer, and gives
the next one to the peer that got rid of the last. Here the peers are the roots of the forest,
and a root says itself how much it may be given: its *credit* grows as its children take what it
was given before. So fast subtrees take more chunks and no bandwidth has to be estimated.

What a root got and did not confirm in time, or was holding when it died, is given again to
another root.

A root confirms what it likes, so its children have a say too. A peer that asks the origin
itself for a chunk that a root had long ago *complains* of that root, and so does one that was
sent a wrong chunk. A root of which two complain *falls*: the origin signs a new roster in which
it is a leaf, so that another interior peer takes its stripe. Of what it had, the origin gives
again what is asked for at once, and the rest when all else has left: an honest root that was
slandered has passed it on, and the others do not wait for what they have. A peer's first
complaint that counts is its only one of a version: n liars cost n/2 roots their place for a
while, and nothing more. (A signed frame as proof of a wrong chunk would convict only liars that
sign their lies: one that signs the right digest in front of wrong bytes looks to all others
like an honest relay.)

Where all peers' uplinks together carry less than the origin could give away, most roots are
*full* for most of the time: they have all that they asked for, since their children lag. Then
the origin sends further chunks to every peer directly, each time that no root has credit and
little is under way: Mutualcast's third way. A chunk sent so is in no stripe, and no peer passes
it on.

New peers come during a hand-out: with each new roster the forest changes (`regroup`). Chunks
that are on their way stay on the forest under which they left.

An origin that restarts does not know what its earlier life gave away: it takes everything for
given, and asks the peers that connect what they hold. As soon as one of the roster asks it for
a chunk, it gives that again, and after it all that at most half of those that answered hold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.core.availability import Availability
from p2p.shardcast.core.average import UsualTime
from p2p.shardcast.core.line import MAX_CREDIT, Line, Lines
from p2p.shardcast.core.receipts import Carried, ReceiptBook
from p2p.shardcast.core.statements import MAX_ROSTERS
from p2p.shardcast.forest import MESH, Forest, Roster
from p2p.shardcast.manifest import Encoding, PolicyVersion
from p2p.shardcast.messages import Receipt

_AT_RISK: Final = 4
"""Chunks lately given to a root that dies which are given again, confirmed or not: a root
confirms what it has received and may not have forwarded. As many may lie in the buffers between
two hosts."""
_ACCUSERS: Final = 2
"""Peers that must complain of a root before it is replaced: with one, any peer could slander
any root. In a roster of two there is only one peer that can."""
_FORWARDING: Final = 1
"""Shortest waits after which a chunk that was given to a root should be with all (0.5 s at the
usual ``stall``): peers that ask the origin for it before that have only been impatient, which
is no complaint."""
_OPENING: Final = 2
"""Shortest waits after a roster with new peers in which no complaint counts (1 s at the usual
``stall``), where there are trees: the peers hear of the roster, ask where their children are,
and dial them. A hundred that pulled at once made three of their four roots fall; three hundred
made 20 fall, one after another, each for one more roster of 13 KB to all."""
_LATE: Final = 4
"""Mean confirmation times after which a chunk is late and goes to another root. Example: chunks
confirmed after 0.3 s in the mean are given again after 1.2 s. A chunk that has not even left
waits behind others in the origin's own queue, and is given four times as long."""
_OWN_PACE: Final = 1.5
"""Times what is usual among all roots that a root's own usual time may be, for its chunks to be
late. A root whose own downlink is the narrowest has its chunks, and what it says of them,
behind seven parents' in one queue: in every version it was late again, and what it was given
came twice to all. Eight uneven links, twelve seeds, times the bound: 1.144 in the mean without
(worst 1.178), 1.109 with (worst 1.147), and half the duplicates. With 2 it is 1.118, with 4
1.119, and a root whose uplink is a fifth of the others' is waited for: `lab_slow_relay` takes
1.59 times the bound instead of 1.14."""

_SLOW: Final = 2.0
"""Times what is usual among all roots, and times what passing a chunk on takes by what its
children claim, that a root's own usual time must be for it to count as slow. `lab_slow_relay`
at level 1, where one has a fifth of its upload: 1.09 times the bound (worst of five seeds 1.19)
with 1.5 and 2, 1.14 (1.26) with 2.5. By the usual time alone, roots that confirm at once and
pass nothing on made honest ones look slow: `black_hole_roots` 3.70 times the bound, not
3.37."""
_FULL: Final = 0.75
"""Share of the roots that are not late which must be full for the peers' uplinks to count as
scarce. Seven ADSL lines of 4 Mbit/s under an origin of 16, on real lines: for nine tenths of
the hand-out. Eight of 10 to 40 under 40: for a third; even lines: for a fiftieth, also on a
machine so slow that the origin's own line carries little. That the origin had nothing under way
was the sign before, and on real lines it had nothing for a fifth of the time only: a single
stream of a line whose acks wait behind what the peer sends itself brings a chunk in 0.4 s, not
in the 33 ms of level 1."""
_SCARCE: Final = 1 / 3
"""Share of a hand-out for which that must have been so before the origin sends chunks to all
peers itself: each byte of its own saves them one. The ADSL lines take 1.26 times the bound
instead of 1.5 to 1.6 (level 3), with 2.3 copies out of the origin instead of 1.2. With a half,
they would have to wait for long (level 1: 15.6 s instead of 12.8); with a quarter, uneven lines
come to it at the end of a hand-out, and win nothing by it. Only up to `MESH` peers: with 24, a
chunk is so long on its way to the last of them that a sixth of all came twice, pulled and
pushed, and no time was won."""
_STILL_SCARCE: Final = 1 / 6
"""The same share once it sends chunks to all: that spares the roots, so they are full less
often, and their uplinks are no less scarce. Without, the origin of the ADSL lines began and
ended it again: 1.13 to 1.40 times the bound with chunks of 32 KiB (level 1, five seeds), with
1.2 to 2.4 copies; with it 1.13 in each."""
_FEW_LANES: Final = 1 / 3
"""Peers to which something may be under way, as a share of the roots, when the next chunk goes
to all of them: two of seven. A stream that waits for acks does not fill the line. From a tenth
to a half makes no difference at level 1."""


class _Root:
    """One root of the forest: what it was given, what it confirmed, who blames it."""

    __slots__ = (
        "_accusers",
        "_confirm_time",
        "_given",
        "_granted",
        "_heard_at",
        "_interval",
        "_left",
        "_line",
        "_rate",
        "confirmed",
        "stripe",
        "trusted",
    )

    def __init__(self, stripe: int, line: Line, rate: float) -> None:
        """Its children can take ``rate`` chunks a second."""
        self.stripe = stripe
        self._line = line
        self._rate = rate
        self._granted = MAX_CREDIT
        self.confirmed = 0
        self.trusted = True
        """Whether it may be given more: not while a chunk of its own is late."""
        self._given: list[_Given] = []
        self._left = 0
        self._accusers: dict[PeerId, None] = {}
        self._confirm_time = UsualTime()
        self._interval = UsualTime()
        """Seconds between two of its confirmations."""
        self._heard_at = -math.inf

    @property
    def late(self) -> float:
        """Seconds from which on its confirmation is unusual; 0 before its first."""
        return self._confirm_time.late

    @property
    def usual(self) -> float:
        """Seconds that its confirmations take, lately; 0 before its first."""
        return self._confirm_time.value

    @property
    def pass_time(self) -> float:
        """Seconds that it needs to pass one chunk on to all its children; 0 if that is not
        known."""
        return 1 / self._rate if self._rate else 0.0

    @property
    def given(self) -> int:
        """Chunks that it was given in all."""
        return len(self._given)

    @property
    def pending(self) -> int:
        """Chunks given and not yet confirmed."""
        return len(self._given) - self.confirmed

    @property
    def has_credit(self) -> bool:
        """Whether it may be given a chunk more, by its own word and by what its line holds."""
        return (
            self.trusted
            and self.given < self._granted
            and self.pending < self._line.credit(max(self._rate, self._pace))
        )

    @property
    def _pace(self) -> float:
        """Chunks that it has confirmed a second, lately; 0 if that is not known.

        What its class says is a slow home's line until its uplink was measured, and after a
        push all peers are new: with two chunks each on the way, the four roots of 40 receivers
        at 40 Mbit/s passed on 17 Mbit/s, and of those half were whole after 5.5 s instead of
        4.4 (`after_ticket`, all at once).
        """
        return 1 / self._interval.value if self._interval.value else 0.0

    @property
    def is_full(self) -> bool:
        """Whether it was given all that it asked for: its children lag."""
        return self.given >= self._granted

    @property
    def oldest(self) -> _Given:
        """The first of those."""
        return self._given[self.confirmed]

    def give(self, chunk: int, now: float) -> None:
        """A chunk is queued for it."""
        self._given.append(_Given(chunk, now))

    def note_left(self, now: float) -> None:
        """The first chunk that had not left has left."""
        if self._left < len(self._given):
            self._given[self._left].leave(now)
            self._left += 1

    def confirm(self, received: int, granted: int, now: float) -> float | None:
        """It has ``received`` chunks in all; returns how long the last took, if that is
        news."""
        took = None
        if received > self.confirmed:
            took = now - self._given[received - 1].since
            if now > self._heard_at > -math.inf:
                self._interval.observe((now - self._heard_at) / (received - self.confirmed))
            self._heard_at = now
            self.confirmed = received
            self._confirm_time.observe(took)
            self._line.note_round_trip(took)
        self._granted = min(granted, received + MAX_CREDIT)
        self.trusted = self.trusted or not self.pending
        return took

    def distrust(self) -> list[int]:
        """Give it nothing more until it has confirmed what it owes; returns that."""
        self.trusted = False
        return self.chunks_from(self.confirmed)

    def chunks_from(self, start: int) -> list[int]:
        """What it was given, from the ``start``-th on."""
        return [given.chunk for given in self._given[start:]]

    def accuse(self, by: PeerId) -> int:
        """One more peer complains of it; returns how many do."""
        self._accusers[by] = None
        return len(self._accusers)

    @property
    def accusers(self) -> int:
        """Peers that complain of it."""
        return len(self._accusers)

    def move(self, stripe: int, rate: float) -> None:
        """By the new roster it is the root of this stripe."""
        self.stripe, self._rate = stripe, rate


@dataclass(slots=True)
class _Given:
    chunk: int
    since: float
    """When it left the origin; until then, when it was queued."""
    has_left: bool = False

    def leave(self, now: float) -> None:
        """It has left: from now on it may be late."""
        self.since, self.has_left = now, True


@dataclass(frozen=True, slots=True)
class _Carrier:
    """The root to which a chunk was given, under which roster, and when."""

    root: PeerId
    roster: Roster
    since: float


@dataclass(slots=True)
class _FullTime:
    """For how much of a hand-out most of its roots were full."""

    began: float
    since: float | None = None
    """Since when they are; None if they are not."""
    before: float = 0.0
    """Seconds for which they were before that."""

    def note(self, are_full: bool, now: float) -> None:
        """They are full now, or are not."""
        if are_full:
            self.since = now if self.since is None else self.since
        elif self.since is not None:
            self.before, self.since = self.before + now - self.since, None

    def share(self, now: float) -> float:
        """Of the time since the hand-out began."""
        full = self.before + (now - self.since if self.since is not None else 0.0)
        return full / (now - self.began) if now > self.began else 0.0


class HandOut:
    """One version on its way out of its origin."""

    def __init__(  # noqa: PLR0913 - what is handed out, along what, by which clocks
        self,
        version: PolicyVersion,
        encoding: Encoding,
        forest: Forest,
        now: float,
        stall: float,
        *,
        lines: Lines,
        shortest: float,
        told: Availability | None = None,
    ) -> None:
        """``encoding`` is what is handed out of ``version``: a patch on the one before, or the
        anchor. ``stall`` is how long to wait for a first confirmation, ``shortest`` the
        shortest of all waits. ``told`` is given if an earlier life began the hand-out: what
        the peers say that they hold."""
        self.version = version
        self.forest = forest
        self.progress = now
        """When a chunk was last given away."""
        self._count = count = encoding.chunks
        self._told = told
        self._next = count if self.is_resumed else 0
        """The first chunk that was never given."""
        self._again: deque[int] = deque()
        """Chunks to give once more, before any new one."""
        self._doubtful: deque[int] = deque()
        """What roots had that fell, and after a restart what most peers lack, to be given once
        more when all else has left."""
        self._lines = lines
        self._chunk_bytes = encoding.wire / count
        self._roots = {
            peer: self._new_root(stripe, peer) for stripe, peer in enumerate(forest.roots)
        }
        self._stall = stall
        self._shortest = shortest
        self._confirm_time = UsualTime()
        self._answered: tuple[PeerId, ...] | None = None
        """Those that had said what they hold when one last asked this life for a chunk."""
        self._missed: dict[int, PeerId] = {}
        """Chunks that one peer has asked the origin itself for, and which."""
        self._given_again: dict[int, float] = {}
        self._carriers: dict[int, _Carrier] = {}
        """The root that each chunk was last given to."""
        self._former: dict[PeerId, _Root] = {}
        """Peers that were roots by an earlier roster: they still confirm."""
        self._back: dict[PeerId, None] = {}
        """Roots that were lost and came again: both sides count from the start."""
        self._fallen: dict[PeerId, None] = {}
        self._voices: dict[PeerId, None] = {}
        """Peers whose complaint was counted."""
        self._began = now
        self._open_at = now + self._opening(())
        self._full = _FullTime(now)
        self._direct: dict[int, None] = {}
        """Chunks that were sent to every peer."""
        self._forests = {self.epoch: forest}
        self._given: dict[tuple[int, int], int] = {}
        """Chunks given, by roster epoch and stripe."""
        self._receipts = ReceiptBook(self._chunk_bytes)

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier life of the origin began it."""
        return self._told is not None

    @property
    def epoch(self) -> int:
        """The epoch of the roster in use."""
        return self.forest.roster.epoch

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left that has to be given, or no root to give it to."""
        return (self._next == self._count and not self._again) or not self._roots

    def give(
        self, has_room: Callable[[PeerId], bool], now: float
    ) -> tuple[PeerId, int, int] | None:
        """The next (root, stripe, chunk); None while no root has credit or nothing is left.

        The root with the fewest unconfirmed chunks comes first, then the one that had the
        fewest in all, then the one of the lowest stripe.
        """
        self._drop_settled_doubts()
        if self.exhausted and not (self._doubtful and self._roots):
            return None
        ready = [
            (root.pending, root.given, root.stripe, peer)
            for peer, root in self._roots_in_time(now)
            if root.has_credit and has_room(peer)
        ]
        if not ready:
            return None
        peer = min(ready)[-1]
        if self._again:
            chunk = self._again.popleft()
            # not to the root that had it, nor to one of which there is a complaint
            had = self._carriers.get(chunk)
            peer = min(
                (had is not None and had.root == root[-1], self._roots[root[-1]].accusers, root)
                for root in ready
            )[-1][-1]
            self._given_again[chunk] = now
        elif self._next < self._count:
            chunk, self._next = self._next, self._next + 1
        else:
            chunk = self._doubtful.popleft()
            self._given_again[chunk] = now
        root = self._roots[peer]
        root.give(chunk, now)
        self._carriers[chunk] = _Carrier(peer, self.forest.roster, now)
        stripe = self.epoch, root.stripe
        self._given[stripe] = self._given.get(stripe, 0) + 1
        self.progress = now
        return peer, root.stripe, chunk

    def _roots_in_time(self, now: float) -> Iterator[tuple[PeerId, _Root]]:
        """Roots that would not keep all others waiting with a chunk that they were given now.

        A slow one gets one at a time, and none at the end, when its word takes longer than all
        that is left and others ask for more. A slow root that had been late and had confirmed
        all of it counted as the freest of all, and got four or five at once: where one relay
        has a fifth of its upload (`lab_slow_relay`, level 1, five seeds) the last of them came
        to all after 1.09 to 1.52 times the bound, now 1.09 to 1.19.
        """
        usual = self._confirm_time.value
        chunks = self._count - self._next + len(self._again) + len(self._doubtful)
        left = chunks * (now - self._began) / max(1, sum(self._given.values()))
        others = any(
            root.trusted and not root.is_full and not self._is_slow(root)
            for root in self._roots.values()
        )
        for peer, root in self._roots.items():
            would_be_last = others and self._is_slow(root) and root.usual > left + usual
            if not would_be_last and not (root.pending and self._is_slow(root)):
                yield peer, root

    def _is_slow(self, root: _Root) -> bool:
        """Whether its word takes longer than is usual among all roots, and than it should."""
        return root.usual > _SLOW * max(self._confirm_time.value, root.pass_time)

    def spread(self, lanes: int, now: float, most: float) -> int | None:
        """The next chunk, to be sent to every peer; None if not now.

        Asked when no root has credit. ``lanes`` are the peers to which something is under way.
        At most ``most`` copies of the version leave in all.
        """
        self._note_full(now)
        peers = len(self.forest.roster.peers)
        copies = (self._next + len(self._direct) * (peers - 1)) / self._count
        is_over = self._next >= self._count or not 1 < peers <= MESH or copies >= most
        is_busy = lanes > _FEW_LANES * len(self._roots)
        if is_over or is_busy or self.is_resumed or not self._are_uplinks_scarce(now):
            return None
        chunk, self._next = self._next, self._next + 1
        self._direct[chunk] = None
        self.progress = now
        return chunk

    def _note_full(self, now: float) -> None:
        # One that is late says nothing of its children, whatever it asked for before: two of
        # seven that confirmed nothing counted as roots with room, and no chunk went to all.
        heard = [root for root in self._roots.values() if root.trusted]
        self._full.note(sum(root.is_full for root in heard) > _FULL * len(heard), now)

    def _are_uplinks_scarce(self, now: float) -> bool:
        return self._full.share(now) > (_STILL_SCARCE if self._direct else _SCARCE)

    def _drop_settled_doubts(self) -> None:
        if not self._doubtful or self._is_doubtful(self._doubtful[0]):
            return
        # of the others most are settled, too, and to ask about each takes seconds
        rare = set(self._told.rare(self._count)) if self._told is not None else set()
        self._doubtful = deque(
            chunk
            for chunk in self._doubtful
            if (self._is_lost(chunk) if chunk in self._carriers else chunk in rare)
        )

    def _is_doubtful(self, chunk: int) -> bool:
        if self._told is None or chunk in self._carriers:
            return self._is_lost(chunk)
        return self._told.is_rare(chunk)

    def _new_root(self, stripe: int, peer: PeerId) -> _Root:
        return _Root(stripe, self._lines.to(peer), self._rate(stripe))

    def _rate(self, stripe: int) -> float:
        """Chunks per second that the children of a stripe's root can take."""
        return self.forest.rate(stripe) / self._chunk_bytes

    def _root(self, peer: PeerId) -> _Root | None:
        return self._roots.get(peer) or self._former.get(peer)

    def _opening(self, known: Iterable[PeerId]) -> float:
        """Seconds in which those that the roster brings together find and dial each other, so
        that no root can pass on much; ``known`` were on the roster before."""
        peers = self.forest.roster.peers
        has_new = len(peers) > len(set(peers) & set(known))
        return _OPENING * self._shortest if has_new and len(peers) > MESH else 0.0

    def regroup(self, forest: Forest, gone: Callable[[PeerId], bool], now: float) -> None:
        """A new roster: what is given from now on goes along ``forest``.

        A root that keeps its place, or comes back to one, goes on counting where it was.
        """
        known = self._former | self._roots
        before, self.forest = self.forest.roster.peers, forest
        self._forests[forest.roster.epoch] = forest
        opening = self._opening(before)
        self._open_at = now + opening if opening else self._open_at
        if len(self._forests) > MAX_ROSTERS:
            del self._forests[min(self._forests)]
        self._roots = {}
        for stripe, peer in enumerate(forest.roots):
            if peer not in self._fallen and not gone(peer):
                root = known.pop(peer, None)
                if root is not None:
                    root.move(stripe, self._rate(stripe))
                self._roots[peer] = root or self._new_root(stripe, peer)
        self._former = known

    def note_left(self, peer: PeerId, now: float) -> None:
        """A chunk has left for a root: from now on it may be late."""
        root = self._root(peer)
        if root is not None:
            root.note_left(now)

    def confirm(self, peer: PeerId, received: int, granted: int, now: float) -> bool:
        """A root confirms and asks for more. False if it claims more than it was given."""
        root = self._root(peer)
        if root is None:
            return True
        if received > root.given:
            # it counts what our earlier life gave it, or what it got before it was lost
            return self.is_resumed or peer in self._back
        took = root.confirm(received, granted, now)
        if took is not None:
            self._confirm_time.observe(took)
        return True

    def note_receipt(self, peer: PeerId, receipt: Receipt) -> bool:
        """``peer`` has the whole version, and says which stripe brought how much of it. Whether
        that is news, of a peer that was to be fed."""
        return any(
            peer in forest.roster.positions for forest in self._forests.values()
        ) and self._receipts.note(peer, receipt)

    def take_receipts(self) -> Iterator[Carried]:
        """Who carried how much, as far as receipts have come since this was last asked."""
        yield from self._receipts.judge(self._forests, self._given)

    def lose(self, peer: PeerId) -> None:
        """A root is gone: what it may not have forwarded goes to others."""
        root = self._roots.pop(peer, None) or self._former.pop(peer, None)
        if root is not None:
            start = min(root.confirmed, max(0, root.given - _AT_RISK))
            lost = root.chunks_from(start)
            self._again.extend(chunk for chunk in lost if chunk not in self._again)

    def admit(self, peer: PeerId) -> None:
        """A peer is here: one that is the root of a stripe, and was lost or had not come yet
        when it was to be fed, is fed from now on. Once: one that comes and goes would leave
        behind what its children complain of."""
        roots = self.forest.roots
        is_known = peer in self._roots or peer in self._fallen or peer in self._back
        if peer in roots and not is_known:
            self._roots[peer] = self._new_root(roots.index(peer), peer)
            self._back[peer] = None

    def complain(self, peer: PeerId, by: PeerId) -> bool:
        """``by`` complains of a root. True if that was the last straw: the root falls."""
        root = self._roots.get(peer)
        if root is None or by == peer or by not in self.forest.roster.positions:
            return False
        if by in self._voices:
            return False
        self._voices[by] = None
        if root.accuse(by) < min(_ACCUSERS, len(self.forest.roster.peers) - 1):
            return False
        self._fallen[peer] = None
        self._former[peer] = self._roots.pop(peer)
        self._doubtful.extend(root.chunks_from(0))
        self._again.extend(
            chunk
            for chunk in sorted(self._missed)
            if self._is_lost(chunk) and chunk not in self._again
        )
        return True

    def accused(self, chunk: int, by: PeerId, now: float) -> PeerId | None:
        """The root of which ``by`` complains when it asks the origin for ``chunk``.

        None if that may still be on its way, or if ``by`` is in no roster under which it was
        given: a peer that came later asks because it came later.
        """
        carrier = self._carriers.get(chunk)
        if carrier is None or by not in carrier.roster.positions:
            return None
        since = max(carrier.since, self._open_at)
        return carrier.root if now >= since + self._forwarding else None

    @property
    def _forwarding(self) -> float:
        """Seconds after which a chunk given to a root should be with all."""
        return _FORWARDING * max(self._shortest, _LATE * self._confirm_time.value)

    def _is_lost(self, chunk: int) -> bool:
        """Whether it was last given to a root that fell."""
        carrier = self._carriers.get(chunk)
        return carrier is not None and carrier.root in self._fallen

    def give_again(self, chunk: int, by: PeerId, now: float, lanes: int) -> bool:
        """A peer of the roster asks the origin itself for a chunk that a root should have
        brought. To ``lanes`` peers something is under way.

        True if the chunk is given again along another stripe, once, which serves every peer
        that misses it. A single request is answered directly: mostly the chunk is on its way.
        After a restart it is not.
        """
        carrier = self._carriers.get(chunk)
        roster = carrier.roster if carrier is not None else self.forest.roster
        if by not in roster.positions or chunk in self._direct:
            return False  # it came later, or is sent the chunk anyway: no stripe failed it
        if self._is_soon_given(chunk, now, lanes):
            return True
        if self._told is not None:
            self._give_what_is_rare(self._told)
        is_lost = self._is_lost(chunk)
        was_given_again = chunk in self._given_again and not is_lost
        others = len(self._roots) - (carrier is not None and not is_lost)
        if chunk < self._next and not was_given_again and others > 0:
            first = self._missed.setdefault(chunk, by)
            if first == by and not self.is_resumed and not is_lost:
                return False
            self._given_again[chunk] = now
            if chunk not in self._again:
                self._again.append(chunk)
            return True
        if chunk in self._again:
            self._given_again.setdefault(chunk, now)  # no root may be left that can take it
        return now < self._given_again.get(chunk, -math.inf) + self._forwarding

    def _is_soon_given(self, chunk: int, now: float, lanes: int) -> bool:
        """Whether not to answer who asks for ``chunk``: it is still to be given along a stripe,
        and the line is busy.

        Who joins while the hand-out has just begun asks for what others have, and for all else
        the origin. Answered at once, a hundred such peers kept its line from its roots for a
        minute, with chunks that most of them had by then: 40 MB, pushed before they came, took
        69 s to reach all instead of 20, and the origin sent 8.2 copies instead of 2.1. When it
        answered all of 300 peers once no root had taken a chunk for half a second, those four
        chunks each filled its line for six, and no root was given any.
        """
        is_busy = lanes > _FEW_LANES * len(self._roots)
        return chunk >= self._next and is_busy and bool(self._roots)

    def _give_what_is_rare(self, told: Availability) -> None:
        """After a restart: what most of those lack that have said what they hold. Looked at
        again when others have answered; the first alone, a liar perhaps, would decide it."""
        answered = tuple(told.holders)
        if answered == self._answered:
            return
        self._answered = answered
        lost = [chunk for chunk in self._doubtful if self._is_lost(chunk)]
        rare = [chunk for chunk in told.rare(self._count) if chunk not in self._carriers]
        self._doubtful = deque([*lost, *rare])

    def expire(self, now: float) -> None:
        """Give again what a root has not confirmed in time, and that root nothing until it
        has."""
        for root in (*self._roots.values(), *self._former.values()):
            if root.trusted and root.pending and self._due(root) <= now:
                self._again.extend(root.distrust())

    def _due(self, root: _Root) -> float:
        """When what the first chunk that it owes is late.

        A root's word waits on its uplink behind what it passes on. Example: at 4 Mbit/s a chunk
        of 64 KiB reaches six children after 0.8 s, or 1.5 s by the line's class. The seven
        roots of such lines, waited for for 0.5 s, were each given two chunks again, which came
        twice to all: 9 % of everything, and 2 % with this wait.
        """
        passing = min(root.pass_time, _LATE * self._stall)
        patience = max(self._stall, self._confirm_time.late, passing)
        patience = max(patience, min(root.late, _OWN_PACE * patience))
        oldest = root.oldest
        return oldest.since + (patience if oldest.has_left else _LATE * patience)

    @property
    def next_deadline(self) -> float:
        """When `expire` next has something to do."""
        waiting = [
            self._due(root)
            for root in (*self._roots.values(), *self._former.values())
            if root.trusted and root.pending
        ]
        return min(waiting, default=math.inf)
