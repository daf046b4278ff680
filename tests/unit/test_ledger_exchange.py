"""Others' ledgers: merged as sets, bounded, and whoever tells two stories is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, strategies as st

from p2p.equivocation import Equivocation
from p2p.errors import BadMessage
from p2p.identity import KeyPair, verify
from p2p.ledger.core.chain import (
    EMPTY,
    MAX_BODY,
    Entry,
    Head,
    SignedHead,
    check_link,
    decode_brief_untrusted,
    decode_fork_untrusted,
    make_entry,
    sign_head,
)
from p2p.ledger.core.exchange import (
    ANSWER_BYTES,
    LEAST,
    MAX_ANSWER,
    MAX_AUTHORS,
    MAX_QUESTION,
    Exchange,
    Shelf,
    decode_answer_untrusted,
    decode_question_untrusted,
)
from p2p.ledger.ledger import FOLDER, KeptLedgers
from p2p.machine import RealWorld
from p2p.membership.heartbeat import (
    MAX_HEARTBEAT,
    Heartbeat,
    Profile,
    decode_heartbeat_untrusted,
    sign_heartbeat,
)
from p2p.multiaddr import Multiaddr
from p2p.wire import MIB, pack
from tests.unit.core_swarm import FakeSigner, peer_named

AUTHOR, OTHER, STRANGER = (KeyPair(bytes([letter]) * 32) for letter in b"aos")


def log(
    length: int,
    author: KeyPair = AUTHOR,
    story: str = "",
    fork_at: int = 0,
    kind: str = "verdict",
) -> list[Entry]:
    """A log whose entries differ from those of other stories from number ``fork_at`` on."""
    entries, head = [], EMPTY
    for number in range(length):
        told = story if number >= fork_at else ""
        entries.append(make_entry(head, author, kind, f"{number}{told}".encode(), 1000.0))
        head = check_link(head, entries[-1])
    return entries


def following(*authors: KeyPair) -> Exchange:
    exchange = Exchange(verify)
    exchange.follow(author.peer_id for author in authors)
    return exchange


def asks(one: Exchange, other: Exchange) -> bool:
    """One question over the wire; whether the other is to ask back."""
    question = one.question().to_bytes()
    assert len(question) <= MAX_QUESTION
    reply = other.answer(decode_question_untrusted(question)).to_bytes()
    assert len(reply) <= MAX_ANSWER
    answer = decode_answer_untrusted(reply)
    for fork in answer.forks:
        one.take_fork_untrusted(fork)
    for statement in answer.statements:
        one.take_untrusted(statement)
    return answer.is_behind


def meet(one: Exchange, other: Exchange) -> None:
    if asks(one, other):
        asks(other, one)


def kept(exchange: Exchange) -> tuple[object, ...]:
    stated = [
        entry.digest for author in exchange.authors for entry in exchange.statements(author)
    ]
    return stated, sorted(exchange.forks)


def test_sides_of_a_partition_heal_to_equal_sets() -> None:
    """Each side had some authors and one half of a log; one author told each side another
    story."""
    authors = [KeyPair(bytes([number]) * 32) for number in range(1, 5)]
    nodes, dice = [following(*authors) for _ in range(20)], Random(1)
    honest = [log(30 + 10 * number, author) for number, author in enumerate(authors[:3])]
    for number, entries in enumerate(honest):
        left, right = nodes[number], nodes[10 + number]
        for entry in entries[: len(entries) // 2]:
            left.take_untrusted(entry)
        for entry in entries if number else ():
            right.take_untrusted(entry)
    for side, story in ((nodes[0], "left"), (nodes[10], "right")):
        for entry in log(5, authors[3], story, fork_at=3):
            side.take_untrusted(entry)
    for _ in range(10):  # apart
        for number in range(20):
            meet(nodes[number], nodes[number // 10 * 10 + dice.randrange(10)])
    assert not any(node.forks for node in nodes)
    assert len({repr(kept(node)) for node in nodes}) == 2
    rounds = 0
    while len({repr(kept(node)) for node in nodes}) > 1:
        rounds += 1
        assert rounds < 10
        for node in nodes:
            meet(node, dice.choice(nodes))
    stated = [entry.digest for entries in honest[1:] for entry in entries]
    assert set(stated) < set(kept(nodes[0])[0])  # type: ignore[call-overload]
    assert [list(node.forks) for node in nodes] == [[authors[3].peer_id]] * 20


@pytest.mark.parametrize("pair", ["entries", "heads", "head and entry", "link"])
def test_two_stories_are_proven_whatever_they_are_told_with(pair: str) -> None:
    one, other = log(6, story="one", fork_at=3), log(6, story="other", fork_at=3)
    heads = [sign_head(Head(4, entries[4].digest), AUTHOR) for entries in (one, other)]
    first, second = {
        "entries": (one[3], other[3]),
        "heads": (heads[0], heads[1]),
        "head and entry": (heads[0], other[4]),
        "link": (one[3], other[4]),  # says that another entry 3 is before it
    }[pair]
    node = following(AUTHOR)
    assert node.take_untrusted(first) == (first if isinstance(first, Entry) else None)
    fork = node.take_untrusted(second)
    assert isinstance(fork, Equivocation)
    assert fork.first.is_signed(verify)
    assert fork.second.is_signed(verify)
    stranger_to_both = following(AUTHOR)
    told = decode_fork_untrusted(fork.encode())
    assert told == fork
    assert stranger_to_both.take_fork_untrusted(told) == fork
    for exchange in (node, stranger_to_both):
        assert list(exchange.forks) == [AUTHOR.peer_id]
        for entry in (*one, *other):
            assert exchange.take_untrusted(entry) is None
        assert list(exchange.statements(AUTHOR.peer_id)) == []


def test_an_honest_author_is_never_convicted() -> None:
    """Of heads, entries and lasting ones in any order, with gaps, a hundred times."""
    entries = log(12)
    for number in (4, 9):
        entries[number:] = continued(
            entries[:number], 12 - number, "ban" if number == 4 else "x"
        )
    heads = [sign_head(Head(entry.seqno, entry.digest), AUTHOR) for entry in entries]
    for seed in range(100):
        statements = [*entries, *heads]
        Random(seed).shuffle(statements)
        node = following(AUTHOR)
        for statement in statements[: 6 + seed % 19]:
            node.take_untrusted(statement)
        assert node.forks == {}


def continued(entries: list[Entry], length: int, kind: str) -> list[Entry]:
    head, more = Head(entries[-1].seqno, entries[-1].digest), []
    for number in range(length):
        more.append(make_entry(head, AUTHOR, kind if not number else "verdict", b"", 1000.0))
        head = check_link(head, more[-1])
    return more


def test_what_nobody_signed_convicts_nobody() -> None:
    (entry,) = log(1)
    node = following(AUTHOR)
    node.take_untrusted(entry)
    forged = replace(entry, body=b"other")
    head = SignedHead(
        AUTHOR.peer_id, 0, b"d" * 32, sign_head(Head(0, b"d" * 32), OTHER).signature
    )
    for statement in (forged, head):
        with pytest.raises(BadMessage, match="wrong signature"):
            node.take_untrusted(statement)
        with pytest.raises(BadMessage, match="wrong signature"):
            node.take_fork_untrusted(Equivocation(entry, statement))
    with pytest.raises(BadMessage):
        decode_fork_untrusted(Equivocation(entry, head).encode()[:-1])
    assert node.forks == {}


def test_a_million_authors_and_huge_entries_leave_no_more_than_the_limits() -> None:
    """Strangers' statements are not even looked at; an author that the run names has its
    share."""
    node = following(AUTHOR)
    for number in range(1000):
        stranger = FakeSigner(peer_named(number))
        assert node.take_untrusted(sign_head(Head(5, b"d" * 32), stranger)) is None
    assert node.authors == [AUTHOR.peer_id]
    node.follow(peer_named(number) for number in range(1_000_000))
    assert len(node.authors) == MAX_AUTHORS
    assert MAX_AUTHORS * LEAST <= 16 * MIB
    assert len(node.question().to_bytes()) <= MAX_QUESTION
    huge = Exchange(lambda *_: True)
    huge.follow([AUTHOR.peer_id])
    head = EMPTY
    for number in range(80):
        entry = Entry(AUTHOR.peer_id, number, head.digest, "ban", 0, bytes(MAX_BODY), b"s" * 64)
        head = Head(number, entry.digest)
        huge.take_untrusted(entry)
    assert huge.size(AUTHOR.peer_id) <= 2 * MIB
    assert len(list(huge.statements(AUTHOR.peer_id))) * MAX_BODY <= 2 * MIB
    asked = following(AUTHOR).question()
    answer = huge.answer(asked)
    assert sum(len(one.encode()) for one in answer.statements) <= ANSWER_BYTES + 2 * MAX_BODY


def test_bans_outlast_the_window_and_reach_who_comes_later() -> None:
    shelf = Shelf(4096)
    bans = log(266, kind="ban")
    for entry in [*bans, *_after(bans[-1], 200)]:
        shelf.add(entry)
    lasting = [entry for entry in shelf if entry.kind == "ban"]
    assert [entry.seqno for entry in lasting] == list(range(10, 266))
    assert len(shelf) < 276
    first, second = following(AUTHOR), following(AUTHOR)
    ban, *rest = [make_entry(EMPTY, AUTHOR, "ban", b"who", 1.0)]
    rest = _after(ban, 400, bytes(8192))
    for entry in (ban, *rest):
        first.take_untrusted(entry)
    assert first.size(AUTHOR.peer_id) <= 2 * MIB
    for _ in range(20):
        asks(second, first)
    kinds = [entry.kind for entry in second.statements(AUTHOR.peer_id)]
    assert kinds[0] == "ban"
    assert kept(first) == kept(second)


@given(st.integers(0, 2**32))
def test_two_shelves_heal_to_equal_sets_whatever_either_missed(seed: int) -> None:
    """In any order, with holes and windows that overflow, asked in a few spans at a time. A
    hole below the newest entry was never asked for."""
    dice, signer, head, entries = Random(seed), FakeSigner(peer_named(1)), EMPTY, []
    for number in range(dice.randint(1, 20)):
        kind = dice.choice(["verdict", "verdict", "verdict", "ban", "lie"])
        body = bytes(dice.randint(0, 600))
        entries.append(make_entry(head, signer, kind, body, 100.0 * number))
        head = check_link(head, entries[-1])
    room = dice.randint(1, 12)
    one, other, whole = (Shelf(budget) for budget in [dice.choice([900, 3000, 10**5])] * 3)
    for side in (one, other):
        for entry in dice.sample(entries, dice.randint(0, len(entries))):
            side.add(entry)
            whole.add(entry)
    for _ in range(2 * len(entries)):
        for asking, asked in ((one, other), (other, one)):
            for entry in list(asked.missing(asking.extent(room)))[:5]:
                asking.add(entry)
    extents = [side.extent(room) for side in (one, other, whole)]
    floor = max(one.floor for one in extents)

    def lasts(entry: Entry) -> bool:
        return entry.seqno > floor or entry.kind != "verdict"

    kept_of = [[entry for entry in side if lasts(entry)] for side in (one, other, whole)]
    assert kept_of[0] == kept_of[1] == kept_of[2]
    if floor < 0:
        assert [*one] == [*whole]


def _after(entry: Entry, count: int, body: bytes = b"") -> list[Entry]:
    head, more = Head(entry.seqno, entry.digest), []
    for _ in range(count):
        more.append(make_entry(head, AUTHOR, "verdict", body, 1000.0))
        head = check_link(head, more[-1])
    return more


def test_a_head_travels_in_a_heartbeat_and_leaves_room_for_all_else() -> None:
    head = sign_head(Head(2**63 - 1, b"d" * 32), AUTHOR)
    assert len(head.brief()) <= 112
    addrs = tuple(Multiaddr.parse(f"/dns4/{'a' * 86}{n}/tcp/65535") for n in range(4))
    full = Profile(
        ledger=head.brief(), stamp=b"s" * 320, run=b"r" * 32, version="v" * 32,
        roles=tuple("09aäöüéß"[number] * 32 for number in range(8)), upload=2**50,
        addrs=addrs,
    )  # fmt: skip
    brief = Profile(ledger=head.brief())
    for profile in (brief, replace(brief, stamp=b"s" * 8), full, Profile()):
        beat = Heartbeat(
            peer=AUTHOR.peer_id, seqno=2**62, expires=2**40, interval=5.0, profile=profile
        )
        sent = sign_heartbeat(beat, AUTHOR)
        assert len(sent.wire) <= MAX_HEARTBEAT
        read = decode_heartbeat_untrusted(sent.wire).heartbeat.profile
        assert read.stamp == profile.stamp
        assert read.ledger == (b"" if profile is full else profile.ledger)
    assert decode_brief_untrusted(AUTHOR.peer_id, head.brief()) == head


async def test_what_is_kept_of_others_outlives_a_restart_and_a_damaged_copy(
    tmp_path: Path,
) -> None:
    """A ban and a proof of two stories are not forgotten; the copies stay within bounds."""
    world, statements = RealWorld(STRANGER, tmp_path), log(4, kind="ban")
    statements += _after(statements[-1], 600, bytes(8192))
    first = following(AUTHOR, OTHER)
    kept_by_first = KeptLedgers(world, first)
    for start in range(0, len(statements), 50):
        news = [first.take_untrusted(one) for one in statements[start : start + 50]]
        await kept_by_first.keep(news)
    fork = Equivocation(log(1, OTHER, "one")[0], log(1, OTHER, "other")[0])
    await kept_by_first.keep([first.take_fork_untrusted(fork)])
    folder = f"{FOLDER}/{AUTHOR.peer_id}"
    size = await world.disk.size(folder)
    assert size is not None
    assert size <= 2.1 * 2 * MIB
    again = following(AUTHOR, OTHER)
    async for one in KeptLedgers(world, again).read():
        if isinstance(one, Equivocation):
            again.take_fork_untrusted(one)
        else:
            again.take_untrusted(one)
    assert kept(again) == kept(first)
    assert list(again.forks) == [OTHER.peer_id]
    await world.disk.write(folder, b"\xff" * 50, 3000)
    damaged = following(AUTHOR)
    found = [one async for one in KeptLedgers(world, damaged).read()]
    assert 0 < len(found) < 10
    assert await world.disk.list(FOLDER) == [str(AUTHOR.peer_id)]


@pytest.mark.parametrize(
    "ends", [[3], [4, 3], [1, 2, 2, 3], [-1, 2], [0, 2**63], [1, "2"], [True, 2]]
)
def test_spans_that_are_none_are_refused(ends: list[object]) -> None:
    row = [AUTHOR.peer_id.digest, 9, bytes(32), -1, 0, 9, ends]
    with pytest.raises(BadMessage):
        decode_question_untrusted(pack([[row], []]))
    row[-1] = [1, 2, 4, 4]
    read = decode_question_untrusted(pack([[row], []])).extents[AUTHOR.peer_id]
    assert read.spans == ((1, 2), (4, 4))
