"""Runs in which work is committed to before it is seen, and a lot says what is checked."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any, ClassVar, Final, Self

import pytest

from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from roles.demo.cheats import Cheat, CheatConfig, CheatMode
from roles.engines.base import Group
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.inference.windows import UNCHECKED, Windows
from roles.protocol.core.assignment import draw_order
from roles.protocol.core.lots import UNIT, WitnessedWindow
from roles.protocol.core.groups import (
    SignedVerdict,
    Submission,
    content_digest,
    decode_groups_untrusted,
    encode_groups,
)
from roles.protocol.replay import answers_of
from roles.rl.recipe import Recipe
from roles.run import Run, run_of, sign_run
from roles.run.core.trust import TrustTerms
from roles.trainer.beacon import BeaconTeller
from roles.trainer.core import promises, windows
from roles.trainer.core.buffer import BufferedGroup
from roles.trainer.inbox import Inbox
from sim.node.swarm import Swarm
from sim.workloads import spine
from tests.simulation.test_bad_submissions import Forger
from tests.simulation.test_roles_faults import Play, perform, validators

TRUST = TrustTerms(share=0.25, probation=8, window=8, validators=2, beacon=0.5)
GROUP: Final = 4
SMALL: Final = {"groups": 32, "submission": 1, "group_size": GROUP}
"""Steps of a few seconds, and places of which a fifth teach nothing."""
CAST = {
    "relay-1": "none",
    "trainer-1": "trainer",
    "validator-1": "validator",
    "validator-2": "validator",
    "validator-3": "validator",
    "inference-1": "inference",
    "inference-2": "inference",
}


@pytest.fixture(autouse=True)
def with_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three validators, and `TRUST` in the run file."""
    one = spine._write_run

    def write_run(swarm: Swarm, recipe: Recipe) -> Run:
        keys = swarm.simulation.keys
        judges = tuple(keys.signer(name).peer_id for name in CAST if "validator" in name)
        terms = replace(one(swarm, recipe).terms, validators=judges, trust=TRUST)
        return sign_run(terms, keys.signer("owner"))

    monkeypatch.setattr(spine, "_write_run", write_run)


def workers(health: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        node["roles"]["inference"]
        for node in health.values()
        if isinstance(node, dict) and "inference" in node["roles"]
    ]


def checked(health: Mapping[str, Any]) -> int:
    """Verdicts of validators."""
    return sum(one["accepted"] + one["rejected"] for one in validators(health))


class Learnt:
    """Contents that went into steps, and how often each group of them did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: Counter[tuple[bytes, int]] = Counter()
        mark = Inbox.mark_used
        steps: dict[int, None] = {}

        async def mark_used(inbox: Inbox, groups: Sequence[BufferedGroup], step: int) -> None:
            if step not in steps:  # a step that is taken again learns from the same
                steps[step] = None
                self.groups.update((one.source, one.number) for one in groups)
            await mark(inbox, groups, step)

        monkeypatch.setattr(Inbox, "mark_used", mark_used)


class Missed:
    """Who handed in less than it had promised, and whose standing ended of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[promises.Miss] = []
        close = promises.WorkPromises.close

        def closing(book: promises.WorkPromises, *args: Any) -> list[promises.Miss]:
            found = close(book, *args)
            self.all += found
            return found

        monkeypatch.setattr(promises.WorkPromises, "close", closing)
        monkeypatch.setattr(promises, "LATE", 1.0)

    @property
    def ended(self) -> list[promises.Miss]:
        """The misses that were one too many."""
        return [one for one in self.all if one.has_ended]


def test_proven_workers_are_learnt_from_and_seldom_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One judge a node and policy replayed everything."""
    missed = Missed(monkeypatch)
    health = perform(Play(CAST), steps=8, **SMALL)
    assert health["done"] == 1
    trainer = health["trainer-1"]["roles"]["trainer"]
    assert trainer["windows_void"] == 0
    assert missed.all == []
    assert trainer["reward"] > trainer["reward_start"] + 0.1
    lives = [one["life"] for one in workers(health)]
    made = sum(life["made"] for life in lives) / GROUP
    places = made - len(lives) * TRUST.probation  # those are checked whole
    drawn = checked(health) / TRUST.validators - len(lives) * TRUST.probation
    assert 0.6 * TRUST.share < drawn / places < 1.6 * TRUST.share
    assert all(life["rejected"] == 0 for life in lives)
    assert all(life["learnt"] > 0 for life in lives)
    assert sum(life["unchecked"] for life in lives) > 0.08 * GROUP * made
    spent = sum(one["committed_bytes"] for one in workers(health)) / made
    assert spent < 1024  # bytes that a place costs which nobody asks for


class Turncoat(Forger):
    """Works as it should until it is in standing, then hands in one place in four that the
    model never drew."""

    name: ClassVar[str] = "inference"
    turn = 0
    turns_at: ClassVar[int] = 100
    forged: ClassVar[dict[bytes, None]] = {}

    def forge_groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        self.turn += 1
        if self.turn < self.turns_at or self.turn % 4:
            return groups
        first, *others = groups[0].completions
        changed = (replace(first, tokens=first.tokens[::-1]), *others)
        lie = (replace(groups[0], completions=changed), *groups[1:])
        self.forged[content_digest(encode_groups(lie))] = None
        return lie


def test_a_worker_that_turns_is_caught_and_nothing_false_is_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """68 of 68 cheats were rejected, and served all the same."""
    learnt = Learnt(monkeypatch)
    Turncoat.forged.clear()
    cast = {**CAST, "inference-2": f"{__name__}:Turncoat"}
    health = perform(Play(cast), steps=8, **SMALL)
    assert health["done"] == 1
    trainer = health["trainer-1"]["roles"]["trainer"]
    assert len(Turncoat.forged) > 5
    assert trainer["windows_void"] > 0
    assert not Turncoat.forged.keys() & {content for content, _ in learnt.groups}
    honest, cheat = (
        health[name]["roles"]["inference"]["life"] for name in ("inference-1", "inference-2")
    )
    assert honest["rejected"] == 0
    assert 0 < cheat["learnt"] < 0.8 * honest["learnt"]


class Redrawer(Cheat):
    """Draws with seeds of its own."""

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        return cls(CheatConfig(mode=CheatMode.REDRAWN))


def test_a_banned_worker_does_not_knock_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did so 200 times a second, with windows and single places by turns."""
    one = spine._write_run

    def write_run(swarm: Swarm, recipe: Recipe) -> Run:
        terms = replace(one(swarm, recipe).terms, ban_seconds=3600)
        return sign_run(terms, swarm.simulation.keys.signer("owner"))

    monkeypatch.setattr(spine, "_write_run", write_run)
    health = perform(Play({**CAST, "cheat-1": f"{__name__}:Redrawer"}), steps=6, **SMALL)
    assert health["done"] == 1
    assert "banned until" in health["cheat-1"]["roles"]["cheat"]["refusal"]
    assert sum(one["refused"].get("banned", 0) for one in validators(health)) < 500


def test_lots_that_begin_while_work_is_on_its_way_hold_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Places sent alone came back to be committed to, behind later ones whose witness waited
    for them: the run stood still."""
    begin = BeaconTeller._begin

    async def begin_late(teller: BeaconTeller) -> None:
        await teller._node.world.sleep(1.0)
        await begin(teller)

    monkeypatch.setattr(BeaconTeller, "_begin", begin_late)
    health = perform(Play(CAST), steps=3, **SMALL)
    assert health["done"] == 1
    assert health["trainer-1"]["roles"]["trainer"]["windows_settled"] > 0
    assert all(one["life"]["rejected"] == 0 for one in workers(health))


def test_kills_lose_nothing_and_double_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window is with its worker, its witness, its judges and the trainer at a time."""

    class Deadly(Play):
        async def disturb(self, swarm: Swarm) -> None:
            rng = swarm.nodes["relay-1"].world.rng("kills")
            for victim in 2 * ["inference-1", "validator-1", "trainer-1"]:
                await swarm.sleep(rng.uniform(0.5, 3.0))
                swarm.kill(victim, torn=rng.random() < 0.5)
                await swarm.sleep(0.3)
                swarm.restart(victim)

    learnt, missed = Learnt(monkeypatch), Missed(monkeypatch)
    health = perform(Deadly(CAST), steps=5, **SMALL)
    assert health["done"] == 1
    assert missed.ended == []
    assert set(learnt.groups.values()) == {1}
    assert health["trainer-1"]["roles"]["trainer"]["windows_void"] == 0
    for one in workers(health):
        life = one["life"]
        ended = sum(life[kind] for kind in ("accepted", "inconclusive", "unchecked"))
        assert life["rejected"] == 0
        assert ended <= life["made"] <= ended + GROUP * (4 + 3 * TRUST.window)


def test_when_no_links_come_everything_is_checked_as_before_and_nobody_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell = BeaconTeller._reveal
    revealed = itertools.count()

    async def reveal(teller: BeaconTeller) -> None:
        if next(revealed) < 24:
            await tell(teller)

    monkeypatch.setattr(BeaconTeller, "_reveal", reveal)
    health = perform(Play(CAST), steps=4, **SMALL)
    assert health["done"] == 1
    assert all(one["life"]["rejected"] == 0 for one in workers(health))
    assert health["trainer-1"]["roles"]["trainer"]["windows_settled"] > 0


class Hidden(Inference):
    """Commits to places that the model never drew, and shows nobody those that are drawn."""

    name: ClassVar[str] = "inference"

    def make_session(self, *args: Any) -> InferenceSession:
        session = HidingSession(*args, self.name, self.counts)
        return session


class HidingSession(InferenceSession):
    turn = 0

    async def ask(
        self, peer: PeerId, submission: Submission, witnessed: WitnessedWindow | None = None
    ) -> SignedVerdict | None:
        self.turn += 1
        is_judge = peer in run_of(self.node).terms.validators
        if self.turn > 100 and witnessed is not None and witnessed.share < UNIT and is_judge:
            return None
        return await super().ask(peer, submission, witnessed)


def test_a_worker_that_shows_no_drawn_place_is_not_learnt_from_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Silence would be the way to escape every lot."""
    monkeypatch.setattr(windows, "PROMPT", 1.0)
    cast = {**CAST, "inference-2": f"{__name__}:Hidden"}
    health = perform(Play(cast), steps=7, **SMALL)
    assert health["done"] == 1
    trainer = health["trainer-1"]["roles"]["trainer"]
    assert trainer["windows_void"] > 0
    honest, hidden = (
        health[name]["roles"]["inference"]["life"] for name in ("inference-1", "inference-2")
    )
    assert honest["rejected"] == 0
    assert hidden["learnt"] < honest["learnt"] / 2


class Dropping:
    """Once in standing, ``who`` commits to no window that earns less than its mean, nor to what
    follows it under that policy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
        self.nodes: set[PeerId] = set()
        self.earned: list[float] = []
        self.dropped: dict[PolicyVersion, None] = {}
        commit = Windows._commit

        async def choosing(these: Windows, places: list[Submission]) -> None:
            world: Any = these._world
            if world.name != who or not these._note:
                return await commit(these, places)
            self.nodes |= {these._node.peer_id}
            version = places[0].commitment.version
            mine = [await self.earn(these, one) for one in places]
            self.earned += mine
            if mean(mine) < mean(self.earned):
                self.dropped[version] = None
            if version not in self.dropped:
                return await commit(these, places)
            for one in places:
                await these._finish(one, UNCHECKED, "")
            return None

        monkeypatch.setattr(Windows, "_commit", choosing)

    async def earn(self, these: Windows, submission: Submission) -> float:
        """The mean reward of a place."""
        commitment = submission.commitment
        order = draw_order(these._run, commitment.node, commitment.version, commitment.policy)
        tasks = await these._environment.tasks(order.task_seeds(commitment.index))
        groups = decode_groups_untrusted(submission.content)
        return mean(await these._environment.rewards(answers_of(tasks, groups)))


def test_a_worker_that_drops_what_earns_little_is_a_newcomer_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had 8 % more reward than others, and its standing."""
    missed = Missed(monkeypatch)
    dropping = Dropping(monkeypatch, "inference-2")
    health = perform(Play(CAST), steps=14, **SMALL)
    assert health["done"] == 1
    assert len(dropping.dropped) > 2
    assert {one.node for one in missed.ended} == dropping.nodes
    honest, chooser = (
        health[name]["roles"]["inference"]["life"] for name in ("inference-1", "inference-2")
    )
    assert chooser["learnt"] < honest["learnt"] / 2
