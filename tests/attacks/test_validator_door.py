"""Strangers that hand in heads, and nothing else: what they cost is bounded, and passes."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, ClassVar

import pytest
import trio
from roles.protocol.core.messages import (
    OFFER_PROTOCOL,
    Commitment,
    SignedVerdict,
    SubmissionHead,
    content_digest,
)
from roles.validator.core.sequence import PASSING as PLACES, DrawSequences, PlaceState
from roles.validator.core.turnstile import Turnstile
from roles.validator.limits import HEADS, HEADS_AT_ONCE, PASSING
from roles.validator.stats import Records
from roles.validator.verdicts import VerdictIndex

from p2p.errors import PeerUnreachable
from p2p.identity import KeyPair, PeerId
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import frame
from proofs.checks import Verdict
from roles.inference.role import Inference
from roles.protocol.core.statements import VERDICT_KIND
from roles.run import run_of
from roles.validator import reception
from tests.attacks.judged import accepted, forge, play, validator
from tests.attacks.test_validator_turns import Malformed

SECONDS = 20.0
STRANGERS = 12
AT_ONCE = 4
LONG = 100_000
"""Bytes: more than a submission of this small run may have."""


def peers(count: int) -> list[PeerId]:
    return [KeyPair(number.to_bytes(32, "big")).peer_id for number in range(1, count + 1)]


class HeadFlooder(Inference):
    """Hands in heads as fast as they are answered."""

    name: ClassVar[str] = "heads"
    at_once = AT_ONCE

    def payload(self, node: Node, number: int) -> bytes:
        raise NotImplementedError

    async def run(self, node: Node) -> None:
        await node.shardcast.wait_policy(PolicyVersion(0))
        async with trio.open_nursery() as nursery:
            numbers = itertools.count()
            for _ in range(self.at_once):
                nursery.start_soon(self._flood, node, numbers)

    async def _flood(self, node: Node, numbers: Any) -> None:
        judge = run_of(node).terms.validators[0]
        while True:
            try:
                await node.locate(judge)
                async with await node.host.open_stream(judge, OFFER_PROTOCOL) as stream:
                    await stream.send_all(self.payload(node, next(numbers)))
                    while await stream.receive_some():
                        pass
                    self.counts.submitted += 1
            except (trio.BrokenResourceError, PeerUnreachable):
                self.counts.retries += 1
            await node.world.sleep(0.02)


class FarPlaces(HeadFlooder):
    """Places that nobody can have come to."""

    def payload(self, node: Node, number: int) -> bytes:
        return frame(forge(node, node.shardcast.newest, 1_000_003 + number, b"\xc1").to_bytes())


class OnePlace(HeadFlooder):
    """One place, again and again with another content."""

    def payload(self, node: Node, number: int) -> bytes:
        content = number.to_bytes(4, "big")
        return frame(forge(node, node.shardcast.newest, 0, content).to_bytes())


class TooLong(HeadFlooder):
    """The head of what is too long, and nothing behind it."""

    def payload(self, node: Node, number: int) -> bytes:
        whole = frame(forge(node, node.shardcast.newest, number, bytes(LONG)).to_bytes())
        return whole[: len(whole) - LONG]


class NoSuchPolicy(HeadFlooder):
    """Under policies that the run will never have."""

    def payload(self, node: Node, number: int) -> bytes:
        return frame(forge(node, 1_000_000 + number, 0, b"\xc1").to_bytes())


class Garbage(HeadFlooder):
    """In its place, and short, but no groups: only the scorer sees it."""

    def payload(self, node: Node, number: int) -> bytes:
        return frame(forge(node, node.shardcast.newest, number, b"\xc1").to_bytes())


def flood(kind: type[HeadFlooder], **changes: Any) -> tuple[Any, Any]:
    """Every node's health, and the validator's ledger."""
    stages: list[Any] = []
    strangers = {f"heads-{n}": f"{__name__}:{kind.__name__}" for n in range(STRANGERS)}
    health = play(
        {"inference-1": "inference", "inference-2": "inference", **strangers},
        SECONDS, steps=1000, change=stages.append, **changes,
    )  # fmt: skip
    node, _ = stages[0]._open["validator-1"]
    return health, node.ledger


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[PeerId]:
    """Whose signatures were looked at."""
    seen: list[PeerId] = []
    check = SubmissionHead.check_signature

    def counted(head: SubmissionHead, verify: Any) -> None:
        seen.append(head.commitment.node)
        check(head, verify)

    monkeypatch.setattr(SubmissionHead, "check_signature", counted)
    return seen


async def _entries(ledger: Any) -> int:
    return int((await ledger.opened()).count(VERDICT_KIND))


@pytest.mark.parametrize("kind", [FarPlaces, OnePlace, TooLong, NoSuchPolicy, Garbage])
def test_strangers_leave_nothing_in_the_ledger_and_honest_work_goes_on(
    kind: type[HeadFlooder], verified: list[PeerId]
) -> None:
    """A hundred of them wrote an entry a head, for ever, and halved honest acceptances."""
    health, ledger = flood(kind)
    judged = validator(health)
    strangers = {health[f"heads-{n}"]["peer"] for n in range(STRANGERS)}
    assert sum(health[f"heads-{n}"]["roles"]["heads"]["submitted"] for n in range(STRANGERS))
    assert accepted(health, "inference") > 30
    assert accepted(health, "heads") == 0
    honest = [record for peer, record in judged["nodes"].items() if peer not in strangers]
    assert [record["rejected"] for record in honest] == [0] * len(honest)
    entries = trio.run(_entries, ledger)
    assert entries <= accepted(health, "inference")
    if kind in (FarPlaces, TooLong, NoSuchPolicy):
        assert strangers.isdisjoint(map(str, verified)), (
            "a head that is refuted is not verified"
        )


def test_strangers_together_are_heard_so_often_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a stranger sent was read as it came, before the work of nodes that do it."""
    heard: list[tuple[PeerId, float]] = []
    stages: list[Any] = []
    receive = reception.receive_head

    async def counted(stream: Any) -> Any:
        node, _ = stages[0]._open["validator-1"]
        heard.append((stream.peer, node.world.now()))
        return await receive(stream)

    monkeypatch.setattr(reception, "receive_head", counted)
    strangers = {f"heads-{n}": f"{__name__}:{FarPlaces.__name__}" for n in range(STRANGERS)}
    health = play(
        {"inference-1": "inference", **strangers}, SECONDS, steps=1000, change=stages.append
    )
    names = {health[f"heads-{n}"]["peer"] for n in range(STRANGERS)}
    times = [at for peer, at in heard if str(peer) in names]
    assert len(times) > HEADS_AT_ONCE
    spent = max(times) - min(times)
    assert len(times) <= HEADS_AT_ONCE + HEADS * spent + 1
    turns = [sum(str(peer) == name for peer, _ in heard) for name in names]
    assert max(turns) <= 2 * min(turns) + AT_ONCE, "each has its turn"


class Crowding(FarPlaces):
    """Twice as many streams at a time as a peer may have."""

    at_once = 24


def test_a_stranger_that_opens_more_streams_than_it_may_loses_its_connection() -> None:
    health = play(
        {"inference-1": "inference", "heads-1": f"{__name__}:Crowding"}, SECONDS, steps=1000
    )
    assert validator(health)["refused"]["too many streams"] >= 10
    heads = health["heads-1"]["roles"]["heads"]
    assert heads["retries"] > 0
    assert accepted(health, "inference") > 10


def test_who_is_judged_again_after_a_restart_is_rejected_again() -> None:
    """Rejections of strangers are in no ledger: the answer is the same because the rule is."""

    class Restarted(Exception):
        """Enough was seen."""

    stages: list[Any] = []

    def change(stage: Any) -> None:
        stages.append(stage)
        real = stage._play

        async def with_restart(swarm: Any, scenario: Any, recipe: Any) -> Any:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(real, swarm, scenario, recipe))
                await swarm.sleep(12.0)
                before.append(validator(stage.health())["rejected"])
                swarm.restart("validator-1")
                await trio.sleep_forever()

        stage._play = with_restart

    before: list[int] = []
    cast = {"inference-1": "inference", "flooder-1": f"{__name__}:Persistent"}
    health = play(cast, 30.0, steps=1000, change=change)
    assert before[0] > 0
    assert validator(health)["rejected"] > 0, "of the new life: the ledger has none"
    assert accepted(health, "flooder") == 0
    assert accepted(health, "inference") > 10


class Persistent(Malformed):
    """Garbage, in the order of its draws."""

    name: ClassVar[str] = "persistent"


def test_turns_go_by_network_then_by_peer_and_what_waits_has_an_end() -> None:
    door: Turnstile[str] = Turnstile(1.0, 1.0, in_all=12, per_network=6)
    mob = peers(9)
    for number in range(8):  # two peers of one network
        door.add(mob[number % 2], "net", f"mob {number}", 0.0)
    assert len(door) == 6
    assert door.add(mob[2], "", "lone", 0.0)
    assert door.add(mob[3], "other", "neighbour", 0.0)
    order = [door.next(now) for now in map(float, range(4))]
    assert order == ["mob 0", "lone", "neighbour", "mob 1"]
    assert door.next(3.5) is None
    assert door.seconds_left(3.5) == pytest.approx(0.5)
    door.remove(mob[0], "net", "mob 2")
    door.remove(mob[0], "net", "never came")
    assert [door.next(now) for now in (4.0, 5.0, 6.0, 7.0)] == ["mob 4", "mob 3", "mob 5", None]
    assert len(door) == 0
    assert all(door.add(peer, "", "one", 8.0) for peer in mob)
    assert [door.add(peer, "", "another", 8.0) for peer in mob] == [True] * 3 + [False] * 6


def test_a_newcomer_is_heard_before_those_who_had_many_turns_and_shuts_none_of_them_out() -> (
    None
):
    """It waited for a turn behind each of a hundred that send and send."""
    door: Turnstile[str] = Turnstile(64.0, 64.0, in_all=1024, per_network=128)
    crowd, (newcomer, *mob) = peers(100), peers(2000)[1000:]
    now = 0.0
    for number in range(2000):
        for peer in crowd[: 1 + number % 8]:
            door.add(peer, "", "crowd", now)
        now += 1 / 64
        door.next(now)
    door.add(newcomer, "", "newcomer", now)
    assert "newcomer" in [door.next(now + turn / 64) for turn in (1, 2)]
    now, names = now + 1.0, iter(mob)
    heard = []
    for turn in range(400):  # a new name for each turn
        door.add(next(names), "", "minted", now)
        heard.append(door.next(now + turn / 64))
    assert heard.count("crowd") >= 400 / 4 / 2


def test_a_full_door_makes_room_for_who_has_fewer_streams_at_it() -> None:
    """128 names with eight streams each filled it, and a newcomer was never heard: what a turn
    set free was theirs again before it came back."""
    gone: list[str] = []
    door: Turnstile[str] = Turnstile(
        HEADS, HEADS_AT_ONCE, in_all=1024, per_network=128, evict=gone.append
    )
    *mob, newcomer = peers(129)
    for number in range(8):
        assert all(door.add(peer, "", f"{number}", 0.0) for peer in mob)
    assert not door.add(mob[0], "", "9", 0.0)
    assert [door.add(newcomer, "", "newcomer", 0.0) for _ in range(4)] == [True] * 4
    assert gone == ["7"] * 4  # the newest of whoever has the most
    assert len(door) == 1024
    heard = []
    for turn in range(2 * 128):  # what is set free is theirs at once
        heard.append(door.next(turn / HEADS))
        any(door.add(peer, "", "again", turn / HEADS) for peer in mob)
    assert "newcomer" in heard[:180]


def test_one_name_shuts_no_other_of_its_network_out() -> None:
    gone: list[str] = []
    door: Turnstile[str] = Turnstile(1.0, 1.0, in_all=99, per_network=6, evict=gone.append)
    one, other = peers(2)
    for number in range(9):
        door.add(one, "net", f"{number}", 0.0)
    assert [door.add(other, "net", "other", 0.0) for _ in range(4)] == [True] * 3 + [False]
    assert gone == ["5", "4", "3"]


def test_who_mints_names_displaces_no_node_that_has_worked() -> None:
    """A record of accepted work was forgotten when 10,000 names were rejected after it."""
    key, (worker, *mob) = KeyPair(b"v" * 32), peers(400)

    def say(node: PeerId, kind: Verdict) -> SignedVerdict:
        commitment = Commitment(bytes(32), node, PolicyVersion(1), bytes(32), 0, bytes(32))
        return SignedVerdict(key.peer_id, commitment, kind, "", 0.0, 0.0, ())

    records = Records(max_nodes=8)
    records.count(say(worker, Verdict.ACCEPTED))
    for node in mob:
        records.count(say(node, Verdict.REJECTED))
    assert records.of(worker).accepted == 1
    assert len(records) < 100


def test_what_is_remembered_of_passing_rejections_and_places_has_an_end() -> None:
    key, index, book = KeyPair(b"v" * 32), VerdictIndex(), DrawSequences()
    (worker,) = peers(1)
    book.fill(worker, PolicyVersion(1), 0, b"")
    book.settle_in(worker, PolicyVersion(1))
    for number in range(max(PASSING, PLACES) + 10):
        node = KeyPair((number + 9).to_bytes(32, "big")).peer_id
        digest = content_digest(number.to_bytes(4, "big"))
        commitment = Commitment(bytes(32), node, PolicyVersion(1), bytes(32), 0, digest)
        index.let_pass(SignedVerdict(key.peer_id, commitment, Verdict.REJECTED, "", 0, 0, ()))
        assert index.find(commitment) is not None
        book.fill(node, PolicyVersion(1), 0, b"")
    assert len(index._passing) == PASSING
    assert len(book._passing) == PLACES
    assert book.judge(worker, PolicyVersion(1), 0) is PlaceState.REPLAYED
