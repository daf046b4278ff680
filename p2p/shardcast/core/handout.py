"""Hand-out of a version by its origin: each chunk once, to a root with credit.

BitTorrent calls it super-seeding: the origin gives each chunk to one peer, and gives the next
one to the peer that got rid of the last. Here the peers are the roots of the forest, and a root
says itself how much it may be given: its *credit* grows as its children take what it was given
before. So fast subtrees take more chunks, and no bandwidth has to be estimated.

Each chunk has one record: where it is in its life (`GiftStage`), and the *assignment* that
counts, that is, which root has it. What a root does not confirm in time, or was holding when it
died, is given again to another root, ahead of all that is new; so is a chunk that two peers ask
the origin itself for. Only the latest assignment of a chunk can fail: a root that was relieved
of a chunk and times out later changes nothing.

Of a root that was demoted (`HandOut.report`) the origin gives again what is asked for at once,
and the rest when all else has left: an honest root that was slandered has relayed it, and the
others do not wait for what they have.

New peers come during a hand-out: with each new roster the forest changes (`regroup`). Chunks
that are on their way stay on the forest under which they left.

An origin that restarts does not know what its earlier life gave away: it takes everything for
given, and asks the peers that connect what they hold. As soon as one of the roster asks it for
a chunk, it gives that again, and after it all that at most half of those that answered hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast import messages as msg
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import Availability, Download
from p2p.shardcast.core.pace import (
    SLOW_LINK,
    Patience,
    SmoothedAverage,
    longest_wait,
    shortest_wait,
)
from p2p.shardcast.core.peers import MAX_REMEMBERED
from p2p.shardcast.core.receipts import QUORUM, Capacities, Carried, ReceiptBook
from p2p.shardcast.core.statements import MAX_ROSTERS, Statements
from p2p.shardcast.core.upload import CREDIT, MAX_CREDIT, RECENT
from p2p.shardcast.forest import MESH, Forest, Roster, RosterEntry, build_forest
from p2p.shardcast.manifest import Encoding, PolicyVersion


class GiftStage(Enum):
    """A stage in the life of a chunk of a hand-out."""

    FRESH = auto()
    """The chunk was never given."""
    EARLIER = auto()
    """The origin may have given the chunk before it restarted."""
    GIVEN = auto()
    CONFIRMED = auto()
    LATE = auto()
    """The chunk was not confirmed in time. It is given again unless its root confirms it
    first."""
    AGAIN = auto()
    """The chunk is given again before new chunks."""
    DOUBTED = auto()
    """The chunk is given again after all others."""

    @property
    def is_urgent(self) -> bool:
        """True if the chunk is given before any new one."""
        return self in (GiftStage.LATE, GiftStage.AGAIN)


_S: Final = GiftStage


class GiftEvent(Enum):
    """An event in the life of a chunk of a hand-out: the stages that it ends, and the one that
    it begins. In other stages it changes nothing. All but GIVE and ASK are about the latest
    gift of the chunk."""

    GIVE = (_S.FRESH, _S.LATE, _S.AGAIN, _S.DOUBTED), _S.GIVEN
    CONFIRM = (_S.GIVEN, _S.LATE), _S.CONFIRMED
    TIME_OUT = (_S.GIVEN,), _S.LATE
    LOSE = (_S.GIVEN, _S.CONFIRMED, _S.LATE), _S.AGAIN
    """The root of the chunk is gone, and may not have relayed it."""
    ASK = (_S.EARLIER, _S.GIVEN, _S.CONFIRMED, _S.LATE, _S.DOUBTED), _S.AGAIN
    """Peers ask the origin itself for the chunk."""
    DEMOTE = (_S.GIVEN, _S.CONFIRMED), _S.DOUBTED
    """The root of the chunk lost its stripe."""
    LACK = (_S.EARLIER,), _S.DOUBTED
    """Most peers lack the chunk, as found after a restart."""
    HOLD = (_S.DOUBTED,), _S.EARLIER
    """Most peers hold the chunk, as found after a restart."""


@dataclass(slots=True, eq=False)
class Gift:
    """A chunk that was given to one root, with the roster under which it was given."""

    chunk: int
    root: PeerId
    roster: Roster
    since: float
    """Time at which the chunk left the origin; until it leaves, time at which it was queued."""
    has_left: bool = False


@dataclass(slots=True)
class GivenChunk:
    """A chunk of a hand-out: its stage, its latest gift, and who asked for it."""

    stage: GiftStage
    gift: Gift | None = None
    """The latest gift of the chunk."""
    asker: PeerId | None = None
    """The first peer that asked the origin itself for the chunk."""
    repeated: float = -math.inf
    """Time from which peers that miss the chunk last had reason to expect it along another
    stripe."""


class Line:
    """Round trip and credit of the line to one peer.

    A line is kept busy by as much as fits on it: its rate times its round trip, and a little to
    choose from when the first of that has arrived. Less, and it idles between a word that a
    chunk came and the next chunk; more, and what a slow peer hoards a fast one could have
    carried.
    """

    __slots__ = ("_round_trip",)

    def __init__(self) -> None:
        self._round_trip = math.inf
        """Seconds; infinite before the first measurement."""

    def note_round_trip(self, sample: float) -> None:
        """Note a round trip of ``sample`` seconds, which may include waiting."""
        if sample < self._round_trip:
            self._round_trip = sample
        else:
            self._round_trip += (sample - self._round_trip) / 8

    def credit(self, rate: float) -> int:
        """Return how many unconfirmed chunks a root on this line may have if its children take
        ``rate`` chunks a second."""
        # Before it is measured a round trip is taken for one within a continent, or across one
        # ocean. It decides how many chunks the first roots get ahead.
        round_trip = self._round_trip if self._round_trip < math.inf else 0.1
        return min(MAX_CREDIT, CREDIT + int(rate * round_trip))


class Root:
    """A root of the forest: chunks given and confirmed, and its speed."""

    def __init__(self, stripe: int, line: Line, rate: float, patience: Patience) -> None:
        """Start with nothing given. ``rate`` is the chunks per second that its children can
        take, by their capacity classes."""
        self.stripe: int | None = stripe
        """Its stripe; None once it is no longer a root, although it still confirms chunks."""
        self.confirmed = 0
        self.trusted = True
        """True if the root may be given more chunks. False while one of its chunks is late."""
        self.patience = patience
        """Estimates how long to wait for its confirmations."""
        self._line = line
        self._rate = rate
        self._granted = MAX_CREDIT
        self.gifts: list[Gift] = []
        self._left = 0
        self._interval = SmoothedAverage()
        """Mean seconds between two of its confirmations."""
        self._heard_at = -math.inf

    @property
    def given(self) -> int:
        """Number of chunks that this root was given."""
        return len(self.gifts)

    @property
    def pending(self) -> int:
        """Number of chunks given and not yet confirmed."""
        return len(self.gifts) - self.confirmed

    @property
    def is_open(self) -> bool:
        """True if the root asks for more chunks than it was given."""
        return self.stripe is not None and self.trusted and self.given < self._granted

    @property
    def has_credit(self) -> bool:
        """True if the root may be given another chunk, by its own request and by what its line
        holds.

        Its class says what the line carries until its confirmations do.
        """
        interval = self._interval.value
        rate = 1 / interval if interval else self._rate
        return self.is_open and self.pending < self._line.credit(rate)

    @property
    def finish(self) -> float:
        """Return the seconds until the root confirms a chunk given now; 0 before its first
        confirmation."""
        usual = self.patience.usual if self.confirmed else 0.0
        return usual + self.pending * (self._interval.value or usual)

    @property
    def relay_time(self) -> float:
        """Seconds after which a chunk should have reached all peers below the root.

        The chunk waits behind those that the root relays first, and crosses several lines like
        the root's own, so this is four times the time for one chunk.
        """
        by_class = 1 / self._rate if self._rate else 0.0
        return self.patience.wait(floor=4 * max(self.patience.usual, by_class))

    def note_left(self, now: float) -> None:
        """Record that the next queued chunk has left for this root."""
        if self._left < len(self.gifts):
            gift = self.gifts[self._left]
            gift.since, gift.has_left = now, True
            self._left += 1

    def confirm(self, received: int, granted: int, now: float) -> list[Gift]:
        """Note that it has ``received`` chunks in all; return those that are newly
        confirmed."""
        news = self.gifts[self.confirmed : received]
        if news:
            took = now - news[-1].since
            if now > self._heard_at > -math.inf:
                self._interval.observe((now - self._heard_at) / len(news))
            self._heard_at = now
            self.confirmed = received
            self.patience.observe(took)
            self._line.note_round_trip(took)
        self._granted = min(granted, received + MAX_CREDIT)
        self.trusted = self.trusted or not self.pending
        return news

    @property
    def late_at(self) -> float:
        """Time at which the first unconfirmed chunk is late; infinite if there is none or it
        was already late. Chunks in the origin's own queue do not count."""
        if not (self.trusted and self.pending):
            return math.inf
        oldest = self.gifts[self.confirmed]
        return oldest.since + self.patience.wait() * (1 if oldest.has_left else RECENT)

    def distrust(self) -> list[Gift]:
        """Give the root nothing more until it confirms its chunks; return those chunks."""
        self.trusted = False
        return self.gifts[self.confirmed :]

    def at_risk(self) -> list[Gift]:
        """Return the chunks that the root may not have relayed if it is gone: the unconfirmed
        and the last ones."""
        return self.gifts[min(self.confirmed, max(0, self.given - RECENT)) :]

    def retire(self) -> list[Gift]:
        """Take the stripe from this root, and return all chunks that it was given."""
        self.stripe = None
        return self.gifts

    def move(self, stripe: int, rate: float) -> None:
        """Make this root the root of a stripe of the new roster."""
        self.stripe, self._rate = stripe, rate


class HandOut:
    """A version on its way out of its origin, from the first chunk to the last."""

    def __init__(
        self,
        version: PolicyVersion,
        encoding: Encoding,
        forest: Forest,
        now: float,
        stall: float,
        *,
        lines: BoundedDict[PeerId, Line],
        told: Availability | None = None,
    ) -> None:
        """Start to hand out ``encoding`` of ``version``.

        The encoding is a patch on the version before, or the anchor. ``stall`` is the shortest
        wait in seconds. ``told`` says what peers hold; it is given if the hand-out began before
        a restart.
        """
        self.version = version
        self.forest = forest
        self.progress = now
        """Time at which a chunk was last given away."""
        self._count = count = encoding.chunks
        self._told = told
        self._answered: tuple[PeerId, ...] = ()
        """Peers whose answers were used when `_told` was last computed."""
        self._next = count if self.is_resumed else 0
        """The lowest chunk that was never given."""
        self._chunks: dict[int, GivenChunk] = {}
        self._again: dict[int, None] = {}
        """Chunks that are `LATE` or `AGAIN`, in the order in which they became so."""
        self._doubted: dict[int, None] = {}
        self._lines = lines
        self._chunk_bytes = encoding.wire / count
        self._stall = stall
        self._reports: Counter[PeerId] = Counter()
        """Number of reports about each root."""
        self._reporters: set[PeerId] = set()
        self.demoted: set[PeerId] = set()
        """Roots that lost their stripe because peers reported them."""
        self._roots: dict[PeerId, Root] = {}
        """Roots of the present roster, and former roots of earlier rosters."""
        self._back: dict[PeerId, None] = {}
        """Roots that were lost and came back. Both sides count their chunks from zero again."""
        self._began = now
        self._forests = {self.epoch: forest}
        self._opened = now
        """Time of the last roster that brought together peers that must first dial each
        other."""
        self._given: dict[tuple[int, int], int] = {}
        """Number of chunks given, by (roster epoch, stripe)."""
        self._receipts = ReceiptBook(self._chunk_bytes)
        for stripe, peer in enumerate(forest.roots):
            self._add_root(stripe, peer)

    @property
    def is_resumed(self) -> bool:
        """True if the hand-out began before this origin restarted."""
        return self._told is not None

    @property
    def epoch(self) -> int:
        """The epoch of the roster in use."""
        return self.forest.roster.epoch

    @property
    def _active(self) -> dict[PeerId, Root]:
        return {peer: root for peer, root in self._roots.items() if root.stripe is not None}

    @property
    def exhausted(self) -> bool:
        """True if no chunk is left to give, or no root is left to give it to."""
        return (self._next == self._count and not self._again) or not self._active

    @property
    def delays_until(self) -> float:
        """Time until which this hand-out delays the next version.

        If no root has taken a chunk for the longest wait, all are dead or stuck, and a newer
        version is worth more to the other peers.
        """
        wait = longest_wait(self._chunk_bytes, self._stall)
        return -math.inf if self.exhausted else self.progress + wait

    # The life of a chunk

    def _chunk(self, number: int) -> GivenChunk:
        if number not in self._chunks:
            stage = GiftStage.EARLIER if self.is_resumed else GiftStage.FRESH
            self._chunks[number] = GivenChunk(stage)
        return self._chunks[number]

    def _advance(self, number: int, event: GiftEvent) -> None:
        """Apply an event to a chunk, and update the sets of chunks to give again."""
        chunk = self._chunk(number)
        before = chunk.stage
        ended, begun = event.value
        chunk.stage = after = begun if before in ended else before
        if not after.is_urgent:
            self._again.pop(number, None)
        elif not before.is_urgent:
            self._again[number] = None
        if after is not GiftStage.DOUBTED:
            self._doubted.pop(number, None)
        elif before is not GiftStage.DOUBTED:
            self._doubted[number] = None

    def _settle(self, gifts: list[Gift], event: GiftEvent) -> None:
        """Apply an event to one root's gifts. Chunks that another root has been given since
        stay unchanged."""
        for gift in gifts:
            if self._chunk(gift.chunk).gift is gift:
                self._advance(gift.chunk, event)

    # Giving

    def give(
        self, has_room: Callable[[PeerId], bool], now: float
    ) -> tuple[PeerId, int, int] | None:
        """Return the next (root, stripe, chunk) to send; None if no root has credit or nothing
        is left."""
        number = self._first_chunk()
        if number is None:
            return None
        chunk = self._chunk(number)
        had = chunk.gift
        peer = self._choose_root(had, has_room, now)
        if peer is None:
            return None
        root = self._roots[peer]
        assert root.stripe is not None
        self._advance(number, GiftEvent.GIVE)
        chunk.gift = Gift(number, peer, self.forest.roster, now)
        root.gifts.append(chunk.gift)
        if had is not None or self.is_resumed:
            chunk.repeated = now
        self._next = max(self._next, number + 1)
        stripe = self.epoch, root.stripe
        self._given[stripe] = self._given.get(stripe, 0) + 1
        self.progress = now
        return peer, root.stripe, number

    def _first_chunk(self) -> int | None:
        """Return the next chunk to give: failed ones first, then new ones, then doubtful
        ones."""
        if self._again:
            return next(iter(self._again))
        if self._next < self._count:
            return self._next
        self._drop_settled_doubts()
        return next(iter(self._doubted), None)

    def _choose_root(
        self, had: Gift | None, has_room: Callable[[PeerId], bool], now: float
    ) -> PeerId | None:
        """Return the root that will confirm a chunk first; None if waiting for a better root is
        faster.

        As a receiver asks the holder that would bring a chunk first. A root that has no credit
        now may still be the first; it is waited for if the one that has would be the last to
        confirm of all that is left. A chunk that failed does not go to the root that had it,
        nor to one that a peer reports, unless there is no other.
        """
        takers = {peer: root for peer, root in self._active.items() if root.is_open}
        ready = [
            (
                had is not None and had.root == peer,
                had is not None and self._reports[peer],
                root.finish,
                root.pending,
                root.given,
                root.stripe,
                peer,
            )
            for peer, root in takers.items()
            if root.has_credit and has_room(peer)
        ]
        if not ready:
            return None
        best = min(ready)[-1]
        heard = [root.finish for root in takers.values() if root.confirmed]
        first = min(heard, default=math.inf)
        chunks = self._count - self._next + len(self._again) + len(self._doubted)
        left = chunks * (now - self._began) / max(1, sum(self._given.values()))
        return None if takers[best].finish > first + left else best

    def _rate(self, stripe: int) -> float:
        """Return the chunks per second that the children of a stripe's root can take, by their
        classes."""
        return self.forest.rate(stripe) / self._chunk_bytes

    def _add_root(self, stripe: int, peer: PeerId) -> None:
        rate = self._rate(stripe)
        guess = 1 / (rate or SLOW_LINK / self._chunk_bytes)
        waits = (wait(self._chunk_bytes, self._stall) for wait in (shortest_wait, longest_wait))
        patience = Patience(guess, *waits)
        line = self._lines[peer] = self._lines.get(peer) or Line()
        self._roots[peer] = Root(stripe, line, rate, patience)

    def regroup(self, forest: Forest, gone: Callable[[PeerId], bool], now: float) -> None:
        """Give chunks along ``forest``, made from a new roster, from now on.

        A root that keeps its place, or comes back to one, goes on counting where it was.
        """
        if set(forest.roster.peers) - set(self.forest.roster.peers):
            self._opened = now
        self.forest = forest
        self._forests[self.epoch] = forest
        if len(self._forests) > MAX_ROSTERS:
            del self._forests[min(self._forests)]
        for root in self._roots.values():
            root.retire()
        for stripe, peer in enumerate(forest.roots):
            if peer in self.demoted or gone(peer):
                continue
            if peer in self._roots:
                self._roots[peer].move(stripe, self._rate(stripe))
            else:
                self._add_root(stripe, peer)

    # What roots and their children say

    def note_left(self, peer: PeerId, now: float) -> None:
        """Record that a chunk has left for a root. From now on it may become late."""
        if peer in self._roots:
            self._roots[peer].note_left(now)

    def confirm(self, peer: PeerId, received: int, granted: int, now: float) -> bool:
        """Take a root's confirmation and its request for more. Return False if it claims more
        chunks than it was given."""
        root = self._roots.get(peer)
        if root is None:
            return True
        if received > root.given:
            # it counts what our earlier life gave it, or what it got before it was lost
            return self.is_resumed or peer in self._back
        self._settle(root.confirm(received, granted, now), GiftEvent.CONFIRM)
        return True

    def note_receipt(self, peer: PeerId, receipt: msg.Receipt) -> bool:
        """Take the receipt of `peer`, which has the whole version: the chunks that each stripe
        brought. Return True if it is the first receipt of a peer on a roster."""
        return any(
            peer in forest.roster.positions for forest in self._forests.values()
        ) and self._receipts.note(peer, receipt)

    def take_receipts(self) -> Iterator[Carried]:
        """Return the upload of each peer, judged by the receipts since the last call."""
        yield from self._receipts.judge(self._forests, self._given)

    def expire(self, now: float) -> None:
        """Give late chunks to other roots, and give their roots nothing until they confirm."""
        for root in self._roots.values():
            if root.late_at <= now:
                self._settle(root.distrust(), GiftEvent.TIME_OUT)

    @property
    def next_deadline(self) -> float:
        """Time at which `expire` next has something to do."""
        return min((root.late_at for root in self._roots.values()), default=math.inf)

    def lose(self, peer: PeerId) -> None:
        """Remove a root that is gone, and give to others the chunks that it may not have
        relayed."""
        root = self._roots.pop(peer, None)
        if root is not None:
            self._settle(root.at_risk(), GiftEvent.LOSE)

    def admit(self, peer: PeerId) -> None:
        """Start to feed a peer that has come, if it is the root of a stripe and is not fed yet.

        Each peer is admitted once: a peer that comes and goes would leave chunks behind each
        time.
        """
        roots = self.forest.roots
        is_known = peer in self._roots or peer in self.demoted or peer in self._back
        if peer in roots and not is_known:
            self._add_root(roots.index(peer), peer)
            self._back[peer] = None

    def suspect(self, number: int, by: PeerId, now: float) -> PeerId | None:
        """Return the root that ``by`` implicitly reports by asking the origin for a chunk.

        Return None if the chunk may still be on its way, or if ``by`` is on no roster under
        which it was given: a peer that joined later asks because it joined later.
        """
        gift = self._chunk(number).gift
        root = self._roots.get(gift.root) if gift is not None else None
        if gift is None or root is None or by not in gift.roster.positions:
            return None
        since = gift.since
        if len(self.forest.roster.peers) > MESH:
            since = max(since, self._opened + 2 * self._stall)  # they dial each other
        most = 2 * longest_wait(self._chunk_bytes, self._stall)
        return gift.root if now >= since + min(most, root.relay_time) else None

    def report(self, peer: PeerId, by: PeerId) -> bool:
        """Record the report of ``by`` that a root does not relay. Return True if this demotes
        the root.

        A root confirms whatever it likes, so its children have a say too: a peer reports a root
        when it asks the origin itself for a chunk which that root had long ago, or when the
        root sent it a wrong chunk. A root that `QUORUM` peers report is demoted: the next
        roster makes it a leaf, and another interior peer takes its stripe. Each peer has one
        report a version, so n liars cost n/2 honest roots their stripe for some versions, and
        nothing more.
        """
        root, positions = self._active.get(peer), self.forest.roster.positions
        if root is None or by == peer or by not in positions or by in self._reporters:
            return False
        self._reporters.add(by)
        self._reports[peer] += 1
        if self._reports[peer] < min(QUORUM, len(positions) - 1):
            return False
        self.demoted.add(peer)
        self._settle(gifts := root.retire(), GiftEvent.DEMOTE)
        for gift in gifts:
            chunk = self._chunk(gift.chunk)
            if chunk.gift is gift and chunk.asker is not None:
                self._advance(gift.chunk, GiftEvent.ASK)
        return True

    def ask(self, number: int, by: PeerId, now: float) -> bool:
        """Handle a peer's request to the origin itself for a chunk.

        Return True if the chunk comes along a stripe, which serves every peer that misses it:
        when a second peer asks for a chunk, it is given again, once. The first peer is answered
        directly, since the chunk is mostly on its way.
        """
        chunk = self._chunk(number)
        roster = chunk.gift.roster if chunk.gift is not None else self.forest.roster
        if by not in roster.positions:
            return False  # it came later: no stripe failed it
        if chunk.stage is GiftStage.FRESH:
            return False
        if self._told is not None:
            self._doubt_what_is_rare(self._told)
        is_sure = (
            self.is_resumed or chunk.stage is GiftStage.DOUBTED or chunk.asker not in (None, by)
        )
        chunk.asker = chunk.asker or by
        if chunk.stage.is_urgent:
            return False
        had = chunk.gift.root if chunk.gift is not None else None
        is_repeated = chunk.repeated > -math.inf and chunk.stage is not GiftStage.DOUBTED
        if not is_repeated and any(peer != had for peer in self._active):
            if is_sure:
                self._advance(number, GiftEvent.ASK)
                chunk.repeated = now
            return is_sure
        waits = sorted(root.patience.wait() for root in self._active.values())
        return now < chunk.repeated + (waits[len(waits) // 2] if waits else self._stall)

    # After a restart

    def _doubt_what_is_rare(self, told: Availability) -> None:
        """Queue again the chunks that most responding peers are missing.

        The result is computed again when further peers have answered. Otherwise the first peer
        to answer, perhaps a liar, would decide alone.
        """
        answered = tuple(told.holders)
        if answered == self._answered:
            return
        self._answered = answered
        for number in told.rare(self._count):
            self._advance(number, GiftEvent.LACK)

    def _drop_settled_doubts(self) -> None:
        """Remove doubted chunks that most peers have received meanwhile."""
        first = next(iter(self._doubted), None)
        if self._told is None or first is None or self._chunk(first).gift is not None:
            return
        if not self._told.is_rare(first):
            # of the others most are settled, too, and to ask about each takes seconds
            rare = set(self._told.rare(self._count))
            for number in [n for n in self._doubted if n not in rare]:
                if self._chunk(number).gift is None:
                    self._advance(number, GiftEvent.HOLD)


class Origin:
    """Hands out one version at a time. The next starts when the one before has left; versions
    in between are skipped.

    So a run that publishes faster than its links carry still delivers. Example: 40 versions of
    4 MiB in ten seconds over lines that carry one a second give each receiver eight to ten
    whole versions, the last among them, instead of forty parts.
    """

    def __init__(
        self,
        local: PeerId,
        statements: Statements,
        is_gone: Callable[[PeerId], bool],
        config: ShardcastConfig,
    ) -> None:
        self._local = local
        self._statements = statements
        self._lines: BoundedDict[PeerId, Line] = BoundedDict(MAX_REMEMBERED)
        """The line to each root, kept when the root leaves."""
        self._is_gone = is_gone
        self._config = config
        self._settle = 0.5 * config.stall
        """Seconds between a newcomer's first message, or a peer's receipt, and the next roster.
        Other peers often follow closely, as when a machine room starts."""
        self._capacities = Capacities()
        self._handouts: dict[bytes, HandOut] = {}
        self._next: Download | None = None
        self._resumed = False
        self._unfed: Download | None = None
        """A version that was announced while there was no roster; the first roster hands it
        out."""
        self._regroup_at = math.inf
        """Time at which to ask for a new roster because peers came or a root was demoted."""
        self._regrouped_at = -math.inf
        self._reported_at = math.inf
        """Time at which to ask for a new roster because peers have reported on a hand-out."""

    def publish(self, download: Download, *, resumed: bool) -> None:
        """Make `download` the next version to hand out. ``resumed`` is True if its hand-out
        began before a restart."""
        self._next, self._resumed = download, resumed

    def start(self, now: float) -> list[ev.Effect]:
        """Announce the next version and start its hand-out, if its turn has come."""
        download = self._next
        if download is None or now < self._turn_at:
            return []
        self._next = None
        announcement = ev.Gossip(
            msg.news_of(download.manifest, download.index, msg.INLINE_INDEX)
        )
        roster = self._statements.roster(download.manifest.publisher)
        self._unfed = download if roster is None else None
        self._learn()
        self._capacities.note_version()
        if roster is not None:
            self._hand_out(download, roster, now)
        return [announcement]

    def _hand_out(self, download: Download, roster: Roster, now: float) -> None:
        forest = build_forest(roster, download.manifest.version)
        told = download.availability if self._resumed else None
        version, config = download.manifest.version, self._config
        handout = HandOut(
            version, download.encoding, forest, now, config.stall, lines=self._lines, told=told
        )
        for peer in forest.roots:
            if self._is_gone(peer):
                handout.lose(peer)
        self._handouts[download.name] = handout

    @property
    def _turn_at(self) -> float:
        """Latest time at which the next version starts."""
        return max((h.delays_until for h in self._handouts.values()), default=-math.inf)

    def is_resumed(self, policy: bytes) -> bool:
        """Return True if the hand-out of ``policy`` began before this node restarted."""
        handout = self._handouts.get(policy)
        return handout is not None and handout.is_resumed

    # Rosters

    def _learn(self) -> None:
        """Update the peers' believed capacities from the receipts of finished hand-outs."""
        for handout in self._handouts.values():
            for carried in handout.take_receipts() if handout.exhausted else ():
                self._capacities.note_carried(*carried)

    def believe(self, entries: Iterable[RosterEntry]) -> list[RosterEntry]:
        """Return the entries with the upload that this origin believes of each peer. A peer
        that is gone is believed to relay nothing."""
        self._learn()
        present = (e if not self._is_gone(e.peer) else RosterEntry(e.peer) for e in entries)
        return self._capacities.believe(present)

    def meet(self, peer: PeerId, now: float) -> None:
        """Feed a peer that has come if it is a root. Schedule a new roster if the present one
        lacks it."""
        if not self._handouts and self._unfed is None:
            return
        for handout in self._handouts.values():
            handout.admit(peer)
        roster = self._statements.roster(self._local)
        if roster is None or peer not in roster.positions:
            due = max(now + self._settle, self._regrouped_at + self._config.roster_interval)
            self._regroup_at = min(self._regroup_at, due)

    def is_roster_due(self, now: float) -> bool:
        """Return True once if a new roster is due."""
        if now < min(self._regroup_at, self._reported_at):
            return False
        self._regroup_at, self._regrouped_at = math.inf, now
        self._reported_at = math.inf
        return True

    def regroup(self, roster: Roster, now: float) -> None:
        """Hand out along a newly signed roster from now on."""
        download, self._unfed = self._unfed, None
        if download is not None:
            self._hand_out(download, roster, now)
        for handout in self._handouts.values():
            forest = build_forest(roster, handout.version)
            handout.regroup(forest, self._is_gone, now)

    def give(
        self, has_room: Callable[[PeerId], bool], now: float
    ) -> Iterator[tuple[PeerId, msg.ChunkHeader]]:
        """Return chunks for roots with credit. ``has_room`` is called before each chunk."""
        for name, handout in self._handouts.items():
            while (given := handout.give(has_room, now)) is not None:
                peer, stripe, chunk = given
                yield peer, msg.ChunkHeader(name, chunk, handout.epoch, stripe)

    def note_left(self, peer: PeerId, header: msg.ChunkHeader, now: float) -> None:
        """Record that a chunk has left this node for ``peer``."""
        handout = self._handouts.get(header.policy)
        if handout is not None and header.stripe != msg.NO_STRIPE:
            handout.note_left(peer, now)

    def ask(self, policy: bytes, chunk: int, by: PeerId, now: float) -> bool:
        """Return True if the chunk that ``by`` asks for is given along the forest, not to
        ``by`` alone."""
        handout = self._handouts.get(policy)
        if handout is None:
            return False
        self._report(handout, handout.suspect(chunk, by, now), by, now)
        return handout.ask(chunk, by, now)

    def _report(self, handout: HandOut, root: PeerId | None, by: PeerId, now: float) -> None:
        if root is not None and handout.report(root, by):
            self._capacities.note_demoted(root)
            self._regroup_at = now

    def hear(self, peer: PeerId, message: msg.HandOutMessage, now: float) -> bool:
        """Handle a message of roots or their children about a hand-out. Return False if it
        cannot be true."""
        handout = self._handouts.get(message.policy)
        if handout is None:
            return True
        if isinstance(message, msg.Credit):
            return handout.confirm(peer, message.received, message.granted, now)
        if isinstance(message, msg.Receipt):
            if handout.note_receipt(peer, message) and handout.exhausted:
                self._reported_at = now + self._settle
        else:
            self._report(handout, message.peer, peer, now)
        return True

    def lose(self, peer: PeerId) -> None:
        """Handle the loss of ``peer``: other roots are given the chunks that it may not have
        forwarded."""
        for handout in self._handouts.values():
            handout.lose(peer)

    def forget(self, policy: bytes) -> None:
        """Forget a version that is no longer held or should not be handed out."""
        self._handouts.pop(policy, None)
        if self._next is not None and self._next.name == policy:
            self._next = None
        if self._unfed is not None and self._unfed.name == policy:
            self._unfed = None

    def expire(self, now: float) -> None:
        """Give again the chunks that roots have not confirmed in time."""
        for handout in self._handouts.values():
            handout.expire(now)

    @property
    def next_deadline(self) -> float:
        """Time at which `expire` or `start` next has something to do."""
        due = [self._regroup_at, self._reported_at]
        due += [handout.next_deadline for handout in self._handouts.values()]
        if self._next is not None and self._turn_at > -math.inf:
            due.append(self._turn_at)
        return min(due)
