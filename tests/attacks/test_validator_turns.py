"""Strangers that flood a validator with work that is none."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import trio
from roles.protocol.core.messages import (
    MAX_REPLY,
    OFFER_PROTOCOL,
    SEND,
    Commitment,
    SignedVerdict,
    content_digest,
    encode_groups,
)
from roles.trainer.audit import Auditor
from roles.validator.core.fair_queue import (
    PER_NODE,
    QUEUE,
    REJECTIONS,
    STRANGERS_SHARE,
    FairQueue,
)
from roles.validator.judge import ENGINE_FAILED, STALE, Judge
from roles.validator.limits import GIVEN_UP
from roles.validator.stats import ValidatorStats

from p2p.identity import KeyPair, PeerId
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Verdict
from roles.engines.base import Completion, Group, GroupTask, Sampling, draw_all
from roles.engines.fake import FakeEngine
from roles.envs.base import open_teaching
from roles.envs.client import LocalEnvironment
from roles.envs.sort import VOCABULARY
from roles.inference.places import OpenPlace
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.protocol.core.assignment import draw_order, run_sampling
from roles.protocol.request import offer
from roles.run import run_of
from tests.attacks.judged import accepted, forge, play, validator

AT_ONCE = 8
SCARCE_SCORER = {
    "validator": {"profile": {"score_rate": 2_500.0}},
    "trainer": {"evaluate_every": 0, "profile": {"step_seconds": 0.1}},
}
"""Four workers draw more than is judged, and the trainer takes all that is: each replay of
garbage is one less of honest work."""


class Flooder(Inference):
    """Hands in one submission after the other in the order of its draws, none of which has cost
    it work.
    """

    name: ClassVar[str] = "flooder"

    def groups(self, node: Node, tasks: Sequence[GroupTask]) -> tuple[Group, ...]:
        """What it hands in."""
        raise NotImplementedError

    def version(self, node: Node) -> PolicyVersion:
        """Under which policy it says to have worked: the oldest that the run uses goes
        first.
        """
        return PolicyVersion(max(0, node.shardcast.newest - run_of(node).terms.recipe.lag))

    async def run(self, node: Node) -> None:
        self._next: dict[PolicyVersion, int] = {}
        self._environment = LocalEnvironment(open_teaching("sort"))
        await node.shardcast.wait_policy(PolicyVersion(0))
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(self._flood, node)

    async def _flood(self, node: Node) -> None:
        validator = run_of(node).terms.validators[0]
        while True:
            version = self.version(node)
            if not node.shardcast.holds(version):
                await node.world.sleep(0.1)
                continue
            index = self._next.get(version, 0)
            self._next[version] = index + 1
            policy = node.shardcast.manifest(version).weights_digest
            order = draw_order(run_of(node), node.peer_id, version, policy)
            plain = await self._environment.tasks(order.task_seeds(index))
            tasks = [task for _, task in order.with_draws(index, plain)]
            parts = forge(
                node, version, index, encode_groups(self.groups(node, tasks))
            ).framed()
            while node.shardcast.newest - version <= run_of(node).terms.recipe.lag:
                answer = await offer(
                    node, validator, OFFER_PROTOCOL, parts, SEND.__eq__, MAX_REPLY
                )
                if answer is not None and b"verdict" in answer[:16]:
                    break
                await node.world.sleep(2.0)
            self.counts.submitted += 1


class Malformed(Flooder):
    """The right groups with a proof that is none: found out without the model."""

    def groups(self, node: Node, tasks: Sequence[GroupTask]) -> tuple[Group, ...]:
        return tuple(Group(task.group, (Completion((0,), (0.0,)),)) for task in tasks)


class WellFormed(Flooder):
    """Invented tokens and a proof of the right length: found out by a replay only."""

    def groups(self, node: Node, tasks: Sequence[GroupTask]) -> tuple[Group, ...]:
        recipe, rng = run_of(node).terms.recipe, random.Random(tasks[0].group)
        (end,) = run_of(node).terms.model.end_tokens
        others = [token for token in range(len(VOCABULARY)) if token != end]
        groups = []
        for task in tasks:
            completions = tuple(
                Completion(
                    (*rng.choices(others, k=recipe.max_new_tokens - 1), end),
                    (-1.0,) * recipe.max_new_tokens,
                    struct.pack(">4sI16s", bytes(4), 1, bytes(16)),
                )
                for _ in range(recipe.group_size)
            )
            groups.append(Group(task.group, completions))
        return tuple(groups)


WORKERS = {f"inference-{number}": "inference" for number in range(1, 5)}
FLOODERS = 8
SECONDS = 30.0


def flood(kinds: Sequence[type[Flooder]], seconds: float = SECONDS) -> Any:
    count = FLOODERS if kinds else 0
    flooders = {
        f"flooder-{n}": f"{__name__}:{kinds[n % len(kinds)].__name__}" for n in range(count)
    }
    return play(
        {**WORKERS, **flooders}, seconds, role_config=SCARCE_SCORER, steps=1000, groups=48
    )


@pytest.fixture(scope="module")
def quiet() -> int:
    return accepted(flood(()), "inference")


@pytest.mark.parametrize("kinds", [(WellFormed,), (Malformed, WellFormed)])
def test_eight_flooders_cost_four_workers_less_than_a_tenth(
    quiet: int, kinds: Sequence[type[Flooder]]
) -> None:
    """Garbage under the oldest policy went first, and honest work lost a third and
    more.
    """
    health = flood(kinds)
    assert validator(health)["rejected"] > 0
    assert accepted(health, "flooder") == 0
    assert quiet > 200
    assert accepted(health, "inference") >= 0.9 * quiet


def spoil_places(
    session: InferenceSession, spoil: Callable[[list[Group]], list[Group]]
) -> None:
    """Let ``spoil`` change the honest groups of each place before they are handed in."""

    async def begin(place: OpenPlace) -> None:
        groups = await draw_all(session.engine, place.tasks, run_sampling(session.run))
        place.ended |= {group.group: group for group in spoil(groups)}

    session.begin = begin  # type: ignore[method-assign]


class Stumbling(Inference):
    """An honest worker whose first work is spoilt."""

    name: ClassVar[str] = "inference"

    def make_session(self, *parts: Any) -> InferenceSession:
        session = super().make_session(*parts)
        begin = session.begin

        def spoil(groups: list[Group]) -> list[Group]:
            session.begin = begin  # type: ignore[method-assign]
            return [replace(group, completions=group.completions[:1]) for group in groups]

        spoil_places(session, spoil)
        return session


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups the scorer was asked for, each time."""
    sizes: list[int] = []
    score = FakeEngine.score

    async def counted(self: FakeEngine, tasks: Any, groups: Any, sampling: Sampling) -> Any:
        sizes.append(len(groups))
        return await score(self, tasks, groups, sampling)

    monkeypatch.setattr(FakeEngine, "score", counted)

    async def unseen(*_: object) -> None: ...

    monkeypatch.setattr(Auditor, "audit", unseen)  # the trainer's engine is not counted
    return sizes


def test_after_its_first_rejection_a_cheat_costs_a_group(replays: list[int]) -> None:
    """Each cheat cost the scorer as much as honest work; so few were judged that a cheat of a
    13-minute run was caught 3 times.
    """
    health = play({"flooder-1": f"{__name__}:WellFormed"}, 12.0, steps=1000)
    assert replays[0] > 1
    assert set(replays[1:]) == {1}
    assert validator(health)["rejected"] >= len(replays) > 8


def test_honest_work_of_a_node_in_debt_is_replayed_whole(replays: list[int]) -> None:
    health = play({"inference-1": f"{__name__}:Stumbling"}, 20.0, steps=1000)
    assert validator(health)["rejected"] == 1
    assert accepted(health, "inference") > 2
    assert replays.count(1) > 2


def node(number: int) -> PeerId:
    return KeyPair(number.to_bytes(32, "big")).peer_id


V0, V1, V2 = PolicyVersion(0), PolicyVersion(1), PolicyVersion(2)
WORKER, OTHER = node(1), node(2)


def turns(*proven: PeerId) -> FairQueue[str]:
    return FairQueue(lambda peer: peer in proven)


def served(
    queue: FairQueue[str], count: int, now: float = 0.0, seconds: float = 1.0
) -> list[str]:
    out = []
    for _ in range(count):
        out.append(queue.pop(now))
        queue.charge(seconds)
    return out


def test_nodes_take_turns_by_time_and_the_oldest_policy_breaks_ties() -> None:
    """The oldest policy went first, whoever named it, and however often."""
    queue = turns(WORKER, OTHER)
    for number in range(8):
        queue.push(WORKER, V0, f"old {number}", 0.0)
    for number in range(8):
        queue.push(OTHER, V2, f"new {number}", 0.0)
    order = served(queue, 16)
    assert order[0] == "old 0"
    assert [name for name in order if name.startswith("new")] == [
        f"new {number}" for number in range(8)
    ]
    assert 3 <= sum(name.startswith("new") for name in order[:10]) <= 6
    queue.push(WORKER, V1, "dear", 0.0)
    served(queue, 1, seconds=100.0)
    queue.push(WORKER, V0, "again", 0.0)
    for number in range(8):
        queue.push(OTHER, V2, f"cheap {number}", 0.0)
    assert served(queue, 8)[-1] == "cheap 7", "who has had 100 s waits until the other has"


def test_a_rejection_puts_a_node_behind_and_fades() -> None:
    """A node of a thousand rejections was served like any other."""
    queue = turns(WORKER, OTHER)
    queue.blame(OTHER, 0.0)
    queue.push(OTHER, V0, "debtor", 0.0)
    queue.push(WORKER, V1, "worker", 0.0)
    assert served(queue, 2) == ["worker", "debtor"]
    assert not queue.is_proven(OTHER, 10.0)
    assert queue.is_proven(OTHER, 70.0)
    for _ in range(8):
        queue.blame(OTHER, 70.0)
    assert not queue.is_proven(OTHER, 70.0 + 200.0)
    assert queue.is_proven(OTHER, 70.0 + 300.0)


def test_newcomers_get_their_share_and_no_more_and_go_before_debtors() -> None:
    """Newcomers without end shared the scorer with those who work."""
    queue, count = turns(WORKER), 0
    debtor, crowd = node(99), [node(number) for number in range(10, 40)]
    queue.blame(debtor, 0.0)
    queue.push(debtor, V0, "debtor", 0.0)
    for stranger in crowd[:20]:
        queue.push(stranger, V0, "stranger", 0.0)
    order = []
    for _ in range(160):
        queue.push(WORKER, V2, "worker", 0.0)
        order += served(queue, 1)
    count = order.count("stranger")
    assert abs(count - 160 * STRANGERS_SHARE) <= 1
    assert "debtor" not in order
    assert queue.has_debtor(0.0)
    assert queue.pop(0.0, of_debtors=True) == "debtor"


def test_the_second_line_has_its_share_of_time_not_of_turns() -> None:
    """A turn cost as much as a whole submission, though a group was enough."""
    queue, debtor, turns_of_debtor = turns(WORKER), node(99), 0
    queue.blame(debtor, 0.0)
    spent = {"worker": 0.0, "debtor": 0.0}
    for _ in range(400):
        queue.push(WORKER, V2, "worker", 0.0)
        queue.push(debtor, V0, "debtor", 0.0)
        name = queue.pop(0.0)
        cost = 1.0 if name == "worker" else 0.25
        queue.charge(cost)
        spent[name] += cost
        turns_of_debtor += name == "debtor"
    assert spent["debtor"] / sum(spent.values()) == pytest.approx(STRANGERS_SHARE, rel=0.1)
    assert turns_of_debtor > 400 * 3 * STRANGERS_SHARE


def test_a_full_queue_lets_go_of_who_stands_worst() -> None:
    """64 submissions of flooders were 64 refusals for others."""
    queue, debtor = turns(WORKER), node(99)
    queue.blame(debtor, 0.0)
    assert [queue.push(debtor, V0, f"{n}", 0.0)[0] for n in range(PER_NODE + 1)] == [
        True
    ] * PER_NODE + [False]
    strangers = [node(number) for number in range(100, 100 + QUEUE)]
    taken = [queue.push(stranger, V0, "stranger", 0.0) for stranger in strangers]
    assert sum(ok for ok, _ in taken) == QUEUE // 2, (
        "half of it is for nodes without accepted work"
    )
    gone = [item for _, item in taken if item is not None]
    assert sorted(gone) == [f"{n}" for n in range(PER_NODE)]
    assert all(queue.push(WORKER, V0, "worker", 0.0) == (True, None) for _ in range(PER_NODE))
    assert len(queue) == QUEUE // 2 + PER_NODE


def test_an_idle_line_saves_nothing_up() -> None:
    queue = turns(WORKER)
    for _ in range(100):
        queue.push(WORKER, V0, "worker", 0.0)
        served(queue, 1)
    for number in range(8):
        queue.push(OTHER, V0, f"stranger {number}", 0.0)
        queue.push(WORKER, V0, f"worker {number}", 0.0)
    assert sum(name.startswith("stranger") for name in served(queue, 8)) <= 1


def test_garbage_of_one_identity_fills_no_ledger() -> None:
    """Each rejection is kept for ever: there were 2,208 in 20 s, which is 4.7 GB of disk a
    day.
    """
    health = play({"flooder-1": f"{__name__}:Malformed"}, 12.0, steps=1000)
    assert REJECTIONS <= validator(health)["rejected"] <= REJECTIONS + 12 * 2 * REJECTIONS / 60


def test_when_much_was_rejected_nodes_in_debt_wait_and_newcomers_do_not() -> None:
    queue, debtor, newcomer = turns(WORKER), node(98), node(99)
    for number in range(REJECTIONS):
        queue.blame(node(1000 + number % 8), 0.0)
    queue.blame(debtor, 0.0)
    queue.push(debtor, V0, "debtor", 0.0)
    assert not queue.has_work(0.0)
    assert not queue.has_debtor(0.0)
    queue.push(newcomer, V1, "newcomer", 0.0)
    queue.push(WORKER, V2, "worker", 0.0)
    assert queue.has_work(0.0)
    assert sorted(served(queue, 2)) == ["newcomer", "worker"]
    assert not queue.has_work(0.0)
    assert queue.has_work(60.0)
    assert served(queue, 1, now=60.0) == ["debtor"]


def test_claims_of_old_work_displace_no_answer_that_must_be_given_again() -> None:
    """1,024 of them, a kilobyte each: who then asked again about work that was given up was a
    replayer.
    """
    key = KeyPair(b"v" * 32)

    def sign(commitment: Commitment, verdict: Verdict, reason: str) -> SignedVerdict:
        return SignedVerdict(key.peer_id, commitment, verdict, reason, 0.0, 0.0, ()).signed(key)

    world = SimpleNamespace(sometimes=lambda *_: None)
    node: Any = SimpleNamespace(world=world)
    replayer: Any = SimpleNamespace(sign=sign)
    nothing: Any = None
    judge = Judge(node, nothing, replayer, ValidatorStats())

    def claim(number: int) -> Commitment:
        return Commitment(bytes(32), WORKER, V0, bytes(32), number, content_digest(b""))

    first = judge.give_up(claim(0), ENGINE_FAILED)
    for number in range(1, GIVEN_UP + 2):
        judge.give_up(claim(number), STALE)
    assert list(judge.verdicts._given_up.values()) == [first]


def test_what_is_known_of_stale_policies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It grew with every verdict for as long as the validator ran."""
    monkeypatch.setattr("roles.validator.verdicts.KNOWN", 16)
    stages: list[Any] = []
    health = play(
        {"inference-1": "inference", "inference-2": "inference"},
        60.0,
        steps=8,
        change=stages.append,
    )
    role = stages[0]._open["validator-1"][1][0]
    assert validator(health)["accepted"] > 32
    assert validator(health)["rejected"] == 0
    verdicts = role.session._judge.verdicts
    assert len(verdicts) < validator(health)["accepted"]
    fresh = 8 - run_of(stages[0]._open["validator-1"][0]).terms.recipe.lag
    assert all(version >= fresh for version, _ in list(verdicts._recorded)[16:])
