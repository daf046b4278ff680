"""Receipts that lie: from strangers, again and again, and after all others."""

from __future__ import annotations

from p2p.identity import PeerId
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.receipts import Capacities, ReceiptBook
from p2p.shardcast.forest import Roster, RosterEntry, build_forest
from p2p.shardcast.manifest import Manifest, PolicyVersion
from p2p.shardcast.messages import Receipt
from p2p.wire import KI, MIB
from tests.unit.shardcast_liars import LiarSwarm
from tests.unit.test_shardcast_core import RUN, key


class Flooded(LiarSwarm):
    """Forty peers have a version, and have told so; then liars send receipts."""

    def __init__(self) -> None:
        super().__init__(40)
        self.first = self.newest
        self.asked = 0
        """How often the origin wanted a new roster."""
        self.manifest: Manifest = self.publish(1, 4 * MIB, 64 * KI)
        self.run(10)
        self.asked = 0

    def _regroup(self) -> None:
        self.asked += 1
        super()._regroup()

    def lie(self, liars: list[PeerId], every: float, seconds: float) -> None:
        """Each says, in turn, that it got nothing by any stripe."""
        took = 1000
        start = self.now
        while self.now < start + seconds:
            took += 1
            for liar in liars:
                rows = tuple((1, stripe, 0) for stripe in range(4))
                receipt = Receipt(self.manifest.digest, took, rows)
                self.give(self.origin, ev.Heard(liar, receipt))
            self.run(self.now + every)

    def fewest(self) -> float:
        """What the origin believes of the weakest, as a share of the strongest."""
        roster = self.sign(99)
        uploads = [roster.upload(peer) for peer in roster.peers]
        return min(uploads) / max(uploads)


def test_two_that_report_last_do_not_unmake_the_relays_above_them() -> None:
    """Four of forty were believed to carry nothing, for ever."""
    swarm = Flooded()
    forest = build_forest(swarm.first, PolicyVersion(1))
    family = next(
        children
        for stripe in forest.stripes
        for children in stripe.children.values()
        if len(children) >= 4
    )
    liars = [forest.roster.peers[child] for child in family[:2]]
    swarm.lie(liars, 1.2, 12)
    assert swarm.fewest() == 1
    assert swarm.asked == 0


def test_a_stranger_does_not_time_the_origins_rosters() -> None:
    """It made the origin look for a roster 50 times a minute, or put off one that was due."""
    swarm = Flooded()
    swarm.lie([key(999).peer_id], 0.4, 4)
    swarm.run(swarm.now + 2)
    swarm.lie([key(999).peer_id], 1.2, 6)
    assert swarm.asked == 0


def test_who_was_said_to_carry_nothing_is_tried_again() -> None:
    """A relay that was away for one version was a leaf until its origin started anew."""
    capacities, peer = Capacities(), key(1).peer_id
    capacities.note_carried(peer, (0.0, 0.0), 0.0)
    believed = []
    for _ in range(9):
        capacities.note_version()
        believed.append(capacities.believe([RosterEntry(peer, 1e6)])[0].upload)
    assert believed == [0.0] * 8 + [1e6]


def test_the_last_child_to_report_does_not_speak_for_the_others() -> None:
    """One child that had got nothing made its relay one that carries nothing."""
    entries = [RosterEntry(key(number).peer_id, 1e6) for number in range(1, 41)]
    forest = build_forest(Roster.sign(key(0), RUN, 1, entries), PolicyVersion(1))
    peers, stripe = forest.roster.peers, forest.stripes[0]
    relay = next(
        place
        for place, children in stripe.children.items()
        if place != stripe.root and len(children) >= 4
    )
    book, digest = ReceiptBook(1000.0), bytes(32)
    *honest, liar = stripe.children[relay]
    others = [place for place in range(40) if place not in (*honest, liar)]
    for places, chunks in ((others, 100), (honest, 25)):
        for place in places:
            book.note(peers[place], Receipt(digest, 1000, ((1, 0, chunks),)))

    def limit() -> float | None:
        judged = book.judge({1: forest}, {(1, 0): 100})
        return next(carried.limit for carried in judged if carried.peer == peers[relay])

    quarter = 25 * 1000.0 * len(stripe.children[relay])
    assert limit() == quarter
    book.note(peers[liar], Receipt(digest, 1000, ((1, 0, 0),)))
    assert limit() == quarter
