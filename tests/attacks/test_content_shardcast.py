"""What strangers can send to SHARDCAST costs memory, traffic and trust within bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from time import process_time
from unittest.mock import patch

import pytest
import trio

from p2p.errors import BadMessage
from p2p.identity import KeyPair, PeerId, verify
from p2p.shardcast import messages as msg
from p2p.shardcast.bulk import MAX_UNFINISHED, FrameBudget, Sender
from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.core import ShardcastCore
from p2p.shardcast.core.statements import MAX_ROSTERS, Statements
from p2p.shardcast.core.versions import MAX_FETCHES
from p2p.shardcast.forest import Roster, RosterEntry, build_forest
from p2p.shardcast.index import MAX_INDEX, Index, digest_of
from p2p.shardcast.manifest import NO_POLICY, Encoding, Manifest, PolicyVersion
from p2p.wire import KI, MIB, encode_varint, frame
from tests.shardcast_policies import index_of
from tests.support.shardcast_town import Member, Town, publish

TRAINER, LOCAL, STRANGER = (
    KeyPair(digest_of(name)) for name in (b"trainer", b"local", b"stranger")
)
PEERS = [KeyPair(digest_of(b"%d" % number)).peer_id for number in range(400)]
DATA = [b"chunk %d" % number for number in range(4)]
INDEX = index_of(DATA)


def manifest(signer: KeyPair = TRAINER, version: int = 1, index: Index = INDEX) -> Manifest:
    return Manifest(
        signer.peer_id,
        b"run",
        PolicyVersion(version),
        NO_POLICY,
        b"",
        index.digest,
        index.size,
        (Encoding.anchor(index, index.size),),
    ).sign(signer)


class Course:
    """A core with a clock of its own, and how many signatures it had verified."""

    def __init__(self, *, holds: bool = False) -> None:
        self.verified = 0
        self.now = 0.0
        statements = Statements(b"run", TRAINER.peer_id.__eq__, self._verify)
        self.core = ShardcastCore(LOCAL.peer_id, ShardcastConfig(), statements, Random(1))
        if holds:
            self.core.handle(ev.Resumed(manifest(), INDEX, ChunkSet.below(4), True), 0.0)

    def _verify(self, peer: PeerId, domain: str, content: bytes, signature: bytes) -> bool:
        self.verified += 1
        return verify(peer, domain, content, signature)

    def hear(self, peer: PeerId, message: object, *, gossip: bool = False) -> list[ev.Effect]:
        self.now += 0.001
        return self.core.handle(ev.Heard(peer, message, gossip), self.now)  # type: ignore[arg-type]


def answers(effects: list[ev.Effect], kind: type) -> int:
    said = [e.message for e in effects if isinstance(e, ev.Send)]
    pushed = [e.item for e in effects if isinstance(e, ev.Push)]
    return sum(isinstance(one, kind) for one in (*said, *pushed))


def test_a_root_that_keeps_a_chunk_for_itself_is_found_out_by_counting() -> None:
    """No neighbour has the chunk, and others keep coming, so nothing else is late."""
    course, index = Course(), index_of([b"chunk %d" % number for number in range(100)])
    for peer in (TRAINER.peer_id, PEERS[0]):
        course.core.handle(ev.PeerUp(peer), 0.0)
    course.hear(TRAINER.peer_id, msg.PolicyNews(manifest(index=index).encode(), index.data))
    effects: list[ev.Effect] = []
    for number in (0, *range(2, 100)):
        course.now += 0.05
        while course.core.next_deadline <= course.now:
            effects += course.core.handle(ev.Tick(), course.now)
        header = msg.ChunkHeader(manifest(index=index).digest, number, 1, 0)
        course.core.handle(ev.ChunkCame(PEERS[0], header, 8), course.now)
    wanted = ev.Send(TRAINER.peer_id, msg.Want(manifest(index=index).digest, (1,)))
    assert wanted in effects


def test_hello_all_day_is_answered_once_per_connection() -> None:
    course = Course(holds=True)
    effects = [e for _ in range(1000) for e in course.hear(PEERS[0], msg.Hello(-1))]
    assert answers(effects, msg.PolicyNews) == 1
    course.core.handle(ev.PeerDown(PEERS[0]), course.now)
    course.core.handle(ev.PeerUp(PEERS[0]), course.now)
    assert answers(course.hear(PEERS[0], msg.Hello(-1)), msg.PolicyNews) == 1


def test_an_index_is_handed_out_to_one_peer_a_few_times() -> None:
    course = Course(holds=True)
    effects = [
        e for _ in range(1000) for e in course.hear(PEERS[0], msg.Ask(manifest().digest, True))
    ]
    assert answers(effects, msg.PolicyNews) <= 16


def test_a_chunk_asked_for_again_and_again_is_sent_twice_the_policy_at_most() -> None:
    course, sent = Course(holds=True), 0
    for _ in range(2000):
        effects = course.hear(PEERS[0], msg.Want(manifest().digest, (0,)))
        while pushed := answers(effects, msg.ChunkHeader):
            sent += pushed
            effects = course.core.handle(ev.ChunkSent(PEERS[0], 7), course.now)
    assert sent <= 2 * len(INDEX) + 64


def test_chunks_left_to_a_child_again_and_again_are_looked_at_twice() -> None:
    """51 bytes that left 4,096 chunks to a child took 103 ms, as often as they came."""
    course, index = Course(), index_of([b"%d" % number for number in range(64)])
    news, roster = (
        manifest(index=index),
        Roster.sign(
            TRAINER,
            b"run",
            1,
            [RosterEntry(peer, 1e6) for peer in (*PEERS[:20], LOCAL.peer_id)],
        ),
    )
    forest = build_forest(roster, news.version)
    stripe, parent = next(
        (stripe, peer)
        for stripe in range(len(forest.stripes))
        for peer in roster.peers
        if forest.is_above(stripe, peer, LOCAL.peer_id) and peer != LOCAL.peer_id
    )
    course.hear(TRAINER.peer_id, msg.RosterNews(roster.encode()))
    course.hear(TRAINER.peer_id, msg.PolicyNews(news.encode(), index.data))
    [download] = course.core.downloads
    looked_at = 0

    def forward(*_: object) -> None:
        nonlocal looked_at
        looked_at += 1

    for number in range(64):
        course.core.handle(ev.ChunkCame(PEERS[0], msg.ChunkHeader(news.digest, number), 8), 1.0)
    with patch("p2p.shardcast.core.upload.Upload.forward", forward):
        for _ in range(100):
            course.hear(parent, msg.Skipped(news.digest, 1, stripe, ((0, 64),)))
    assert download.is_whole
    assert 64 <= looked_at <= 2 * 64 + 64


def test_a_have_list_that_is_no_news_starts_no_search_for_holders() -> None:
    """64 holders that sent nothing, and one that repeated its list, took 2 ms a message."""
    course, index = Course(), index_of([b"%d" % number for number in range(64)])
    news = manifest(index=index)
    course.hear(TRAINER.peer_id, msg.PolicyNews(news.encode(), index.data))
    for peer in PEERS[:64]:
        course.core.handle(ev.PeerUp(peer), 0.0)
        course.hear(peer, msg.Have(news.digest, ((0, 64),)))
    with patch("p2p.shardcast.core.repair.Repair.pull", side_effect=AssertionError):
        for _ in range(100):
            assert not course.hear(PEERS[0], msg.Have(news.digest, ((0, 64),)))


def test_who_names_a_version_first_and_keeps_its_manifest_hides_it_from_nobody() -> None:
    """The first peer with an unknown version was asked for its manifest, and no other ever."""
    course, have = Course(), msg.Have(manifest().digest, ((0, 4),))
    wanted = msg.Ask(manifest().digest, True)
    assert course.hear(STRANGER.peer_id, have) == [ev.Send(STRANGER.peer_id, wanted)]
    assert course.hear(PEERS[0], have) == []
    course.now += 1.0
    assert course.hear(PEERS[0], have) == [ev.Send(PEERS[0], wanted)]


def test_a_set_of_sixteen_times_the_holes_takes_no_multiple_of_that() -> None:
    """A peer has 131,136 asks; for every other of 64 Ki chunks each took up to 620 ms."""
    few, many = (ChunkSet(int("01" * holes, 2)) for holes in (2 * KI, 32 * KI))

    def seconds(chunks: ChunkSet) -> float:
        took = []
        for _ in range(5):
            begun = process_time()
            parts = list(chunks.ranges())
            took.append(process_time() - begun)
            assert ChunkSet.of_ranges(sum(parts, ())) == chunks
        return min(took)

    assert seconds(many) < 48 * seconds(few)


@pytest.mark.parametrize(
    "message", [msg.Hello(-1), msg.Ask(bytes(32), True), msg.Want(manifest().digest, (0,))]
)
def test_gossip_makes_nobody_talk_to_its_author(
    message: msg.Hello | msg.Ask | msg.Want,
) -> None:
    """50 bytes made each node of the run send 20 KiB to whom they named their author."""
    course = Course(holds=True)
    with pytest.raises(BadMessage):
        course.hear(STRANGER.peer_id, message, gossip=True)


def test_a_wrong_index_does_not_make_old_news_of_a_manifest() -> None:
    """A stranger that was first, with an index of its own, stopped the manifest's spread."""
    course = Course()
    with pytest.raises(BadMessage, match="index"):
        course.hear(
            STRANGER.peer_id,
            msg.PolicyNews(manifest().encode(), bytes(len(INDEX.data))),
            gossip=True,
        )
    effects = course.hear(
        TRAINER.peer_id, msg.PolicyNews(manifest().encode(), INDEX.data), gossip=True
    )
    assert any(isinstance(effect, ev.PassOn) for effect in effects)


def test_what_strangers_sign_is_not_verified_and_pushes_nothing_out() -> None:
    course = Course()
    course.hear(PEERS[0], msg.PolicyNews(manifest().encode(), b""))
    assert course.verified == 1
    for version in range(100):
        forged = msg.PolicyNews(manifest(STRANGER, version).encode(), b"")
        assert not course.hear(STRANGER.peer_id, forged, gossip=True)
        roster = Roster.sign(
            STRANGER, b"run", version, [RosterEntry(peer) for peer in PEERS[:3]]
        )
        course.hear(STRANGER.peer_id, msg.RosterNews(roster.encode()))
    course.hear(PEERS[0], msg.PolicyNews(manifest().encode(), b""))
    assert course.verified == 1


def test_a_trainer_that_signs_all_day_fills_no_table() -> None:
    course, signed = Course(), range(1, 100)
    for number in signed:
        roster = Roster.sign(TRAINER, b"run", number, [RosterEntry(LOCAL.peer_id)])
        course.hear(PEERS[0], msg.RosterNews(roster.encode()))
        news = msg.PolicyNews(manifest(version=number).encode(), INDEX.data)
        course.hear(PEERS[0], news, gossip=True)
    known = [n for n in signed if course.core.statements.roster(TRAINER.peer_id, n)]
    assert known == list(signed[-MAX_ROSTERS:])
    assert len(course.core.downloads) == MAX_FETCHES


async def test_a_peer_that_takes_nothing_of_what_it_asks_for_is_given_up() -> None:
    sender = Sender(STRANGER.peer_id, None, None)
    for _ in range(65):
        assert not sender.scope.cancel_called
        sender.push_nowait(msg.Hello(5))
    assert sender.scope.cancel_called


async def test_room_is_made_at_the_cost_of_who_has_no_business_here() -> None:
    budget, done = FrameBudget(), []

    async def take(name: str, trusted: bool, begun: trio.Event) -> None:
        with budget.frame(trusted=trusted) as hold:
            hold(MAX_UNFINISHED * 2 // 5)
            begun.set()
            await finish.wait()
            done.append(name)

    finish = trio.Event()
    async with trio.open_nursery() as nursery:
        for name, trusted in (
            ("parent", True), ("first", False), ("second", False), ("child", True),
        ):  # fmt: skip
            begun = trio.Event()
            nursery.start_soon(take, name, trusted, begun)
            await begun.wait()
        assert budget.held == MAX_UNFINISHED * 2 // 5 * 2
        finish.set()
    assert sorted(done) == ["child", "parent"]
    assert budget.held == 0


class Drip:
    """A bulk stream whose sender never finishes its frame."""

    def __init__(self, peer: PeerId, head: bytes, pieces: int) -> None:
        self.peer = peer
        self.was_reset = False
        self.waits = trio.Event()
        self._head = head
        self._left = pieces

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        if self._head:
            head, self._head = self._head, b""
            return head
        if self._left:
            self._left -= 1
            return bytes(bytearray(64 * KI))
        self.waits.set()
        await trio.sleep_forever()

    def reset(self) -> None:
        self.was_reset = True
        self.waits.set()


@asynccontextmanager
async def besieged(tmp_path: Path, streams: list[Drip]) -> AsyncIterator[Member]:
    """A node that reads ``streams`` while the block runs; each has got as far as it goes."""
    with trio.fail_after(30):
        async with Town(tmp_path).member(0) as member, trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(member.shardcast._receiver.read_bulk, stream)
            for stream in streams:
                await stream.waits.wait()
            yield member
            nursery.cancel_scope.cancel()


async def test_chunks_nobody_wants_are_not_kept_while_they_come(tmp_path: Path) -> None:
    """200 peers with an unfinished frame of 4 MiB each once held 800 MB."""
    header = msg.encode_chunk_header(msg.ChunkHeader(bytes(32), 0))
    head = encode_varint(msg.MAX_BULK) + header
    streams = [Drip(peer, head, 60) for peer in PEERS[:40]]
    async with besieged(tmp_path, streams) as member:
        assert member.shardcast._receiver.budget.held == 0


async def test_unfinished_messages_share_one_budget(tmp_path: Path) -> None:
    head = encode_varint(msg.MAX_BULK_MESSAGE) + b"\1"
    streams = [Drip(peer, head, 40) for peer in PEERS[:40]]  # 2.5 MiB each, 100 in all
    async with besieged(tmp_path, streams) as member:
        assert (
            MAX_UNFINISHED - 3 * MIB < member.shardcast._receiver.budget.held <= MAX_UNFINISHED
        )
        assert sum(stream.was_reset for stream in streams) == 15


async def test_a_longer_message_is_refused_at_its_length(tmp_path: Path) -> None:
    async with Town(tmp_path).member(0) as member:
        long = Drip(STRANGER.peer_id, encode_varint(MAX_INDEX + 2 * MIB) + b"\1", 40)
        with pytest.raises(BadMessage, match="bulk frame"), trio.fail_after(30):
            await member.shardcast._receiver.read_bulk(long)


async def test_a_peer_has_one_bulk_stream(tmp_path: Path) -> None:
    head = encode_varint(msg.MAX_BULK_MESSAGE) + b"\1"
    streams = [Drip(STRANGER.peer_id, head, 20) for _ in range(50)]
    async with besieged(tmp_path, streams) as member:
        assert member.shardcast._receiver.budget.held < 2 * MIB
        assert sum(stream.was_reset for stream in streams) == 49


async def test_a_thousand_short_messages_at_a_time_do_not_hold_the_loop(tmp_path: Path) -> None:
    messages = frame(msg.encode_bulk_message(msg.Hello(5))) * 3000
    async with Town(tmp_path).member(0) as member, trio.open_nursery() as nursery:
        stream = Drip(STRANGER.peer_id, messages, 0)
        nursery.start_soon(member.shardcast._receiver.read_bulk, stream)
        turns = 0
        while not stream.waits.is_set():
            await trio.lowlevel.checkpoint()
            turns += 1
        nursery.cancel_scope.cancel()
    assert turns > 50


async def test_garbage_is_told_from_old_news(tmp_path: Path) -> None:
    with trio.fail_after(20):
        async with Town(tmp_path).member(0) as trainer:
            await publish(trainer, 1)
            current = trainer.shardcast.manifest(PolicyVersion(1))
            again = msg.encode_message(msg.PolicyNews(current.encode(), b""))
            assert not trainer.shardcast.receive_announcement(STRANGER.peer_id, again)
            unknown = msg.encode_message(msg.PolicyNews(manifest(STRANGER).encode(), b""))
            assert not trainer.shardcast.receive_announcement(STRANGER.peer_id, unknown)
            forged = replace(current, signature=bytes(64))
            for wrong in (
                b"garbage",
                msg.encode_message(msg.PolicyNews(forged.encode(), b"")),
                bytes(MIB),
            ):
                with pytest.raises(BadMessage):
                    trainer.shardcast.receive_announcement(STRANGER.peer_id, wrong)


def test_manifests_that_come_again_or_are_older_start_nothing() -> None:
    course = Course()
    news = msg.PolicyNews(manifest(version=3).encode(), INDEX.data)
    begun = [e for _ in range(3) for e in course.hear(PEERS[0], news)]
    assert sum(isinstance(e, ev.Begin) for e in begun) == 1
    for number, data in enumerate(DATA):
        header = msg.ChunkHeader(manifest(version=3).digest, number)
        course.core.handle(ev.ChunkCame(PEERS[0], header, len(data)), course.now)
    course.core.handle(ev.Stored(manifest(version=3).digest), course.now)
    older = course.hear(PEERS[1], msg.PolicyNews(manifest(version=2).encode(), INDEX.data))
    again = course.hear(PEERS[1], news)
    assert not any(isinstance(e, ev.Begin | ev.Halt) for e in (*older, *again))
    assert course.core.newest == manifest(version=3)
