"""The relay forest: which peer forwards what to which, by a signed roster and a version.

Theory of operation
-------------------
The policy's origin signs a *roster*: the peers it will feed, each with a capacity class (a
power of two of upload, so that noise in a measurement does not reshuffle the swarm). From
(roster, version) every node computes the same *forest* of k *stripes*. Each stripe is a tree
over all peers; a peer is interior in at most one of them, and spends its whole uplink there.
The origin feeds only the k roots.

Up to `MESH` peers, k is the number of peers: the origin gives a chunk to one peer, and that
peer to all others (Li, Chou, Zhang: Mutualcast, 2005). Beyond, k is 4 or 8, and each interior
peer gets child slots in proportion to its capacity, big ones near the root (Castro et al.:
SplitStream, 2003). A stripe of n peers needs n - 1 slots; k of them k (n - 1), which is each
peer's fair share times k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import SIGNATURE_BYTES, PeerId, Signer, Verify, decode_peer_id_untrusted
from p2p.shardcast.index import digest_of
from p2p.shardcast.manifest import (
    MAX_ROSTER,
    MAX_ROSTER_BYTES,
    PROTOCOL_ID,
    ROSTER_ENTRY,
    PolicyVersion,
)
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted

MESH: Final = 16
"""Most peers among which every peer relays to all others: 16 x 15 streams, each of which must
carry at least a chunk per version to be worth its set-up. In simulation (100 Mbit/s, 256
chunks) two hops take 1.07 times the bound with 8 peers and 1.28 with 32, where trees take
1.05."""
CLASS_UNIT: Final = 16 * KI
"""Bytes per second of upload at class 1; each class doubles it. Class 0 relays nothing, and
class 31 has 16 TiB/s, more than any line."""
FOREST_RULE: Final = 3
"""Version number of the rule by which `build_forest` makes stripes. Every roster carries it,
since nodes that build different forests starve each other. Each change of the rule increments
it."""
PLAIN_RULE: Final = 2
"""The rule before `CLOSED`. It makes the same forest when no peer needs rule 3, and older nodes
know it."""
CLOSED: Final = 32
"""Bit in a roster row, above its class, that marks a peer nobody can dial. Any other peer with
which it can punch a hole can feed it. In class 0 it can punch with none, so only peers that can
be dialled feed it."""


class OtherForestRule(BadMessage):
    """A roster is for nodes of another Shoal version: their forest has another rule. Every node
    of a run needs the same one to be fed by its origin. Whoever sent it did nothing wrong."""

    def __init__(self, rule: int) -> None:
        super().__init__(
            f"this roster is for forest rule {rule} and this node follows rule {FOREST_RULE}:"
            " run the same version of Shoal on all nodes of the run"
        )


def capacity_class(upload: float) -> int:
    """Return the capacity class of a peer that can upload ``upload`` bytes per second."""
    return min(CLOSED - 1, int(max(0.0, upload) // CLASS_UNIT).bit_length())


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """A peer that wants policies, with the upload that it claims (bytes per second)."""

    peer: PeerId
    upload: float = 0.0
    is_closed: bool = False
    """True if no peer can dial this one."""


@dataclass(frozen=True, slots=True, eq=False)
class Roster:
    """The peers that an origin feeds, signed by it, in the order of their names."""

    origin: PeerId
    run: bytes
    epoch: int
    peers: tuple[PeerId, ...]
    classes: tuple[int, ...]
    closed: frozenset[int]
    """Indices into the roster of the peers that nobody can dial; empty if all of them can
    punch."""
    content: bytes = field(repr=False)
    signature: bytes = field(repr=False)
    positions: dict[PeerId, int] = field(init=False, repr=False)
    name: bytes = field(init=False, repr=False)
    """Digest of the signed content."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", digest_of(self.content))
        object.__setattr__(
            self, "positions", {peer: place for place, peer in enumerate(self.peers)}
        )

    def __eq__(self, other: object) -> bool:
        """Return True if both rosters have the same content, so that simulated nodes share one
        forest."""
        return isinstance(other, Roster) and self.name == other.name

    def __hash__(self) -> int:
        # for `build_forest` to look up; nothing is ever iterated in its order
        return hash(self.name)

    @classmethod
    def sign(
        cls, signer: Signer, run: bytes, epoch: int, entries: Iterable[RosterEntry]
    ) -> Roster:
        """Sign a roster of ``entries`` without the origin itself. Of more than `MAX_ROSTER`
        entries, the strongest are kept."""
        classes = {
            e.peer: (capacity_class(e.upload), e.is_closed)
            for e in entries
            if e.peer != signer.peer_id
        }
        chosen = sorted(classes.items(), key=lambda item: (-item[1][0], item[0]))[:MAX_ROSTER]
        chosen.sort()
        peers, ranks = tuple(peer for peer, _ in chosen), tuple(rank for _, (rank, _) in chosen)
        closed = frozenset(
            place for place, (_, (_, is_closed)) in enumerate(chosen) if is_closed
        )
        if all(ranks[place] for place in closed):
            closed = frozenset()
        rows = b"".join(
            peer.digest + bytes((rank | CLOSED * (place in closed),))
            for place, (peer, (rank, _)) in enumerate(chosen)
        )
        rule = FOREST_RULE if closed else PLAIN_RULE
        content = pack([rule, signer.peer_id.digest, run, epoch, rows])
        signature = signer.sign(PROTOCOL_ID, content)
        return cls(signer.peer_id, run, epoch, peers, ranks, closed, content, signature)

    def encode(self) -> bytes:
        """Return the signed bytes."""
        return pack([self.content, self.signature])

    def upload(self, peer: PeerId) -> float:
        """Return the lower end of ``peer``'s capacity class in bytes per second; 0 in class 0.

        Raises:
            KeyError: The peer is not on the roster.
        """
        rank = self.classes[self.positions[peer]]
        return float(CLASS_UNIT * 2 ** (rank - 1)) if rank else 0.0

    def neighbours(self, peer: PeerId) -> tuple[PeerId, ...]:
        """Return the peers with which ``peer`` exchanges have-lists: all up to `MESH`, else
        about eight.

        Symmetric, connected, of small diameter: a ring with chords of n^(1/4), n^(1/2),
        n^(3/4). With 81 peers they stand 1, 3, 9 and 27 places to either side.
        """
        place = self.positions.get(peer)
        if place is None:
            return ()
        count = len(self.peers)
        if count <= MESH:
            return tuple(other for other in self.peers if other != peer)
        hops = sorted({round(count ** (power / 4)) for power in range(4)})
        places = dict.fromkeys((place + side * hop) % count for hop in hops for side in (1, -1))
        return tuple(self.peers[other] for other in places if other != place)

    def __repr__(self) -> str:
        return f"Roster(epoch {self.epoch}, {len(self.peers)} peers, by {self.origin!r})"


def decode_roster_untrusted(data: bytes, run: bytes, verify: Verify) -> Roster:
    """Decode a roster of ``run``, and verify its signature.

    Its rows are read only once the signature was judged, so that ``verify`` can refuse unknown
    origins at no cost.

    Raises:
        BadMessage: The bytes are not a well-signed roster of the run. Nothing else is raised
        but the next.
        OtherForestRule: The roster's rule number is of another version of Shoal.
    """
    if len(data) > MAX_ROSTER_BYTES:
        raise BadMessage(
            f"a roster of {len(data)} bytes is over the limit of {MAX_ROSTER_BYTES}"
        )
    content, signature = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, what="signed roster"
    )
    fields = unpack_untrusted(content)
    first = fields[0] if isinstance(fields, list) and fields else None
    if isinstance(first, bytes):
        # The rule of rosters from before they carried a number.
        raise OtherForestRule(1)
    if type(first) is int and first not in (PLAIN_RULE, FOREST_RULE):
        raise OtherForestRule(first)  # the rest may be laid out otherwise
    _, author, named, epoch, rows = fields_untrusted(
        fields, int, bytes, bytes, int, bytes, what="roster"
    )
    origin = decode_peer_id_untrusted(author)
    if named != run:
        raise BadMessage("a roster of another run")
    if (
        not 0 <= epoch <= 2**53
        or len(rows) > MAX_ROSTER * ROSTER_ENTRY
        or len(rows) % ROSTER_ENTRY
    ):
        raise BadMessage("a roster's epoch or length is out of bounds")
    if len(signature) != SIGNATURE_BYTES or not verify(origin, PROTOCOL_ID, content, signature):
        raise BadMessage("a roster's signature is wrong")
    ends = range(ROSTER_ENTRY - 1, len(rows), ROSTER_ENTRY)
    peers = tuple(decode_peer_id_untrusted(rows[end - ROSTER_ENTRY + 1 : end]) for end in ends)
    classes = tuple(rows[end] for end in ends)
    closed = frozenset[int]()
    if first == FOREST_RULE:
        closed = frozenset(place for place, rank in enumerate(classes) if rank & CLOSED)
        classes = tuple(rank & ~CLOSED for rank in classes)
    if any(rank >= CLOSED for rank in classes):
        raise BadMessage("a capacity class is out of bounds")
    if any(a >= b for a, b in pairwise(peers)) or origin in peers:
        raise BadMessage("a roster must be sorted, without repetition and without its origin")
    return Roster(origin, named, epoch, peers, classes, closed, content, signature)


@dataclass(frozen=True, slots=True)
class Stripe:
    """A tree over all peers, named by their places in the roster."""

    root: int
    parent: tuple[int, ...]
    """The parent of each peer, by index; -1, the origin, for the root."""
    children: dict[int, tuple[int, ...]]
    """The children of each interior peer, by index."""
    slots: dict[int, int]
    """The most children of each interior peer, by index."""

    def depth(self, place: int) -> int:
        """Return the number of hops from the origin."""
        return sum(1 for _ in self.ancestors(place)) + 1

    def ancestors(self, place: int) -> Iterator[int]:
        """Return the parent of ``place``, the parent of that parent, and so on to the root."""
        above = self.parent[place]
        while above >= 0:
            yield above
            above = self.parent[above]


@dataclass(frozen=True, slots=True)
class Forest:
    """k stripes over the peers of a roster. The module's docstring states the rules that it
    follows."""

    roster: Roster
    stripes: tuple[Stripe, ...]

    @property
    def roots(self) -> tuple[PeerId, ...]:
        """The peers that the origin feeds, by stripe."""
        return tuple(self.roster.peers[stripe.root] for stripe in self.stripes)

    def children(
        self, stripe: int, peer: PeerId, gone: Callable[[PeerId], bool]
    ) -> tuple[PeerId, ...]:
        """Return the peers to which ``peer`` forwards: its children, and in place of lost
        children their children."""
        tree, peers = self.stripes[stripe], self.roster.peers
        place = self.roster.positions.get(peer)
        waiting = deque(tree.children.get(place, ()) if place is not None else ())
        found = []
        while waiting:
            child = waiting.popleft()
            if gone(peers[child]):
                waiting.extend(tree.children.get(child, ()))
            else:
                found.append(peers[child])
        return tuple(found)

    def relays(self, stripe: int, peer: PeerId) -> bool:
        """Return True if ``peer`` has children in ``stripe``."""
        return self.roster.positions.get(peer, -1) in self.stripes[stripe].children

    def parents(self, peer: PeerId, gone: Callable[[PeerId], bool]) -> tuple[PeerId, ...]:
        """Return the peers that push to ``peer``: in each stripe its parent, or the next
        ancestor that is not lost."""
        place, peers = self.roster.positions.get(peer), self.roster.peers
        if place is None:
            return ()
        nearest = (
            next((above for above in stripe.ancestors(place) if not gone(peers[above])), None)
            for stripe in self.stripes
        )
        return tuple(dict.fromkeys(peers[above] for above in nearest if above is not None))

    def rate(self, stripe: int) -> float:
        """Return the bytes per second that the root of ``stripe`` can pass on to each of its
        children, by its class; 0 if it has none."""
        root = self.stripes[stripe].root
        children = self.stripes[stripe].children.get(root, ())
        return self.roster.upload(self.roster.peers[root]) / max(1, len(children))

    def is_above(self, stripe: int, sender: PeerId, receiver: PeerId) -> bool:
        """Return True if ``sender`` stands above ``receiver`` in ``stripe``, so that a push is
        expected."""
        if not 0 <= stripe < len(self.stripes):
            return False
        above, below = self.roster.positions.get(sender), self.roster.positions.get(receiver)
        if below is None:
            return False
        if sender == self.roster.origin:
            return True
        return above is not None and above in self.stripes[stripe].ancestors(below)


@lru_cache(maxsize=32)
def build_forest(roster: Roster, version: PolicyVersion) -> Forest:
    """Return the forest of ``version``. Forests are cached, since in a simulation every node of
    a process asks for the same one."""
    count = len(roster.peers)
    order = _by_capacity(roster, version)
    if count <= MESH:
        stripes = [_star(roster, order, place) for place in order]
    else:
        # From 128 peers on 8 stripes pay: one level less of depth for each.
        # Number of stripes above `MESH` peers. More stripes mean shallower trees with more
        # children each: 32 peers and 256 chunks take 1.05 times the bound with two and with
        # four stripes, 1.07 with eight.
        most = 8 if count > 128 else 4
        groups = _deal(roster, order, min(most, len(order)))
        weak = (
            [place for place in range(count) if not roster.classes[place]]
            if len(order) < count
            else []
        )
        stripes = [_tree([*order, *weak], group, roster) for group in groups]
    return Forest(roster, tuple(stripes))


def _by_capacity(roster: Roster, version: PolicyVersion) -> list[int]:
    """Return the peers that can relay, strongest first, with equals in an order that depends on
    the version.

    If no peer claims an uplink, as in the first minute of a swarm, all are taken for equals.
    The order does not change with the epoch: a roster that differs by one peer gives a forest
    of which most parts are those of the one before, so that an epoch may begin in the middle of
    a hand-out.
    """
    seed = b"%d:" % version
    capable = [place for place, rank in enumerate(roster.classes) if rank] or range(
        len(roster.peers)
    )
    return sorted(
        capable, key=lambda p: (-roster.classes[p], digest_of(seed + roster.peers[p].digest))
    )


def _star(roster: Roster, order: Sequence[int], root: int) -> Stripe:
    """Build a stripe in which all others are the root's children. Peers that the root cannot
    reach get an open peer as parent."""
    count = len(roster.peers)
    others = [(root + step) % count for step in range(1, count)]
    opened = [place for place in others if place in order and place not in roster.closed]
    below = others if root in roster.closed and opened else []
    below = [place for place in below if _needs_open(roster, place)]
    parent = [-1 if place == root else root for place in range(count)]
    for place in below:
        parent[place] = opened[0]
    children = {root: tuple(place for place in others if place not in below)}
    children |= {opened[0]: tuple(below)} if below else {}
    slots = {place: len(of) for place, of in children.items()}
    return Stripe(root, tuple(parent), {p: of for p, of in children.items() if of}, slots)


def _needs_open(roster: Roster, place: int) -> bool:
    """Return True if only a peer that can be dialled can feed this one."""
    return place in roster.closed and not roster.classes[place]


def _deal(roster: Roster, order: Sequence[int], k: int) -> list[dict[int, int]]:
    """Divide peers into k interior groups with enough child slots each. Return the slots of
    each peer, strongest first.

    A fair share is rounded to the nearest number of slots, and what a group is short of then is
    added to a few. Rounded up, a share a little over a whole number would give nearly every
    peer a child more, and leave the last peers none. Example: of 40 equal peers two relay
    nothing, so a fair share is 4.1. With 5 slots each, 32 relays have all the children, at a
    fifth of an uplink each, and six are idle: 8 MB take 3.00 s. Rounded to the nearest, six of
    the 38 have 5 children and the others at most 4: 2.81 s.
    """
    need = len(roster.peers) - 1
    fair = _fair_slots(roster, order, k * need, need)
    groups: list[dict[int, int]] = [{} for _ in range(k)]
    for turn, place in enumerate(order):
        if fair[place] < 1 and turn >= k:
            break  # too weak to carry even one child; ordered, so are all that follow
        group = min(groups, key=lambda group: sum(group.values()))
        group[place] = max(2, round(fair[place]))
    for group in groups:  # add slots, evenly and big first, until it can carry a stripe
        places = list(group)
        for turn in range(max(0, need - sum(group.values()))):
            group[places[turn % len(places)]] += 1
    return groups


def _fair_slots(
    roster: Roster, order: Sequence[int], slots: int, most: int
) -> dict[int, float]:
    """Divide ``slots`` in proportion to capacity, at most ``most`` to each peer. ``order`` has
    the strongest first.

    The other peers share the slots that a peer at the limit cannot take (water-filling).
    Example with eight stripes: one of 200 peers claims 2^52 bytes per second and gets 199
    slots, which is one stripe. The other 199 peers divide the slots of the other seven stripes.
    If those slots were dropped instead, each stripe would be a star, and 4 MiB would take 18 s
    instead of 1.2 s.
    """
    weights = {place: 2 ** max(0, roster.classes[place] - 1) for place in order}
    fair, left, total = {}, float(slots), sum(weights.values())
    for place in order:
        fair[place] = min(float(most), left * weights[place] / total)
        left, total = left - fair[place], total - weights[place]
    return fair


def _tree(order: Sequence[int], slots: dict[int, int], roster: Roster) -> Stripe:
    """Build a stripe breadth first, in the order of strength.

    Interior peers stand above and all others take the slots that are left, so that peers with
    strong lines get chunks early, from strong peers. Peers that need an open parent choose
    first. Open interior peers then stand below the others, whose children would otherwise take
    their slots.
    """
    count, (root, *inner) = len(order), list(slots)
    if roster.closed:
        inner.sort(key=lambda place: place not in roster.closed)
    interior = [root, *inner]
    parent = [-1] * count
    children: dict[int, list[int]] = {place: [] for place in interior}
    free = [place for place in interior for _ in range(slots[place])]
    leaves = [place for place in order if place not in slots]
    leaves.sort(key=lambda place: not _needs_open(roster, place))
    left = sorted(free[len(inner) :], key=lambda place: place in roster.closed)
    for child, place in zip([*inner, *leaves], [*free[: len(inner)], *left], strict=False):
        children[place].append(child)
        parent[child] = place
    found = {place: tuple(below) for place, below in children.items() if below}
    return Stripe(root, tuple(parent), found, slots)
