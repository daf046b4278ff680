"""A later edition of the run file reaches running roles: who is not named stops, and what
expires, rests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import trio

from p2p.identity import Signer
from p2p.node.rundoc import RunConfig
from proofs.checks import Evidence, Judgement, Limits, Verdict
from roles.contract import Run, Terms, sign_run
from roles.contract.core.file import AdmissionMode, AdmissionRules
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.trust import TrustTerms
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.own.status import SwarmStatus
from roles.protocol import scorer as scoring
from roles.protocol.core.verdict import SignedVerdict
from roles.trainer.session import TrainerSession
from sim.node.swarm import Swarm
from sim.node.world import EPOCH
from sim.run.scenario import Scenario
from sim.workloads import spine
from tests.support.swarm import CAST, Play, nobody_honest_is_rejected, perform, trainer_of
from tests.sweeps import swept

TWO_VALIDATORS = {**CAST, "validator-2": "validator"}

REFRESH = 2.0  # seconds between questions of one node, where a test waits for all to have asked


class Edited(Play):
    """The owner publishes an edition in the middle; every node is watched until well after."""

    signed: list[tuple[str, int, Verdict]]
    """Who signed a verdict, the epoch that it knew, and what it said."""
    published: list[tuple[str, int]]

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        change: Callable[[Swarm, Terms], Terms],
        *,
        seconds: float,
        cast: Mapping[str, str] = CAST,
        first: Callable[[Swarm, Terms], Terms] | None = None,
    ) -> None:
        """Play for ``seconds`` after the edition; ``first`` makes other terms of the run's."""
        super().__init__(cast, first or nothing)
        self._next = change
        self.seconds = seconds
        self.signed = []
        self.published = []
        sign, publish = SignedVerdict.signed, TrainerSession.publish

        def signed(verdict: SignedVerdict, signer: Signer) -> SignedVerdict:
            for name, (node, _) in self._open.items():
                if node.peer_id == verdict.validator:
                    self.signed.append((name, node.run.epoch, verdict.verdict))
            return sign(verdict, signer)

        async def published(of: TrainerSession, step: int) -> None:
            node: Any = of.node
            self.published.append((node.world.name, node.run.epoch))
            await publish(of, step)

        monkeypatch.setattr(SignedVerdict, "signed", signed)
        monkeypatch.setattr(TrainerSession, "publish", published)

    def edition(self, swarm: Swarm, **changes: Any) -> Run:
        assert self._run is not None
        newest = max((node.run.epoch for node, _ in self._open.values()), default=1)
        terms = self._next(swarm, replace(self._run.terms, epoch=newest + 1))
        return sign_run(replace(terms, **changes), swarm.simulation.keys.signer("owner"))

    async def disturb(self, swarm: Swarm) -> None:
        while "validator-1" not in [said[0] for said in self.signed]:
            await swarm.sleep(0.1)
        await self.hand_out(self.edition(swarm))

    async def hand_out(self, run: Run) -> None:
        for node, _ in self._open.values():
            assert await node.book.offer(run.document)

    async def _play(
        self, swarm: Swarm, scenario: Scenario, sampling: SamplingTerms
    ) -> SwarmStatus:
        with trio.CancelScope() as scope:
            watcher = swarm.nodes["relay-1"].world
            while self._status(sampling).trainer.get("step", -1) < 1:
                await watcher.sleep(spine.LOOK)
            await self.disturb(swarm)
            await watcher.sleep(self.seconds)
            scope.cancel()
        return self._status(sampling)


def names(swarm: Swarm, *nodes: str) -> tuple[Any, ...]:
    return tuple(swarm.simulation.keys.signer(name).peer_id for name in nodes)


def naming(**lists: tuple[str, ...]) -> Callable[[Swarm, Terms], Terms]:
    def change(swarm: Swarm, terms: Terms) -> Terms:
        found: dict[str, Any] = {key: names(swarm, *nodes) for key, nodes in lists.items()}
        return replace(terms, **found)

    return change


def nothing(_: Swarm, terms: Terms) -> Terms:
    return terms


def roles_of(health: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(iter(health[name]["roles"].values()))
    return found


def with_a_newcomer(swarm: Swarm, terms: Terms) -> Terms:
    """One worker is in standing from the start, the other never: validators have work."""
    allowed = AdmissionRules(allowed=names(swarm, "inference-1"))
    return replace(terms, admission=allowed, trust=TrustTerms(probation=10_000))


def test_a_removed_validator_signs_nothing_more_and_its_work_goes_to_the_new_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It signed 679 more acceptances; workers went on asking it."""
    change = naming(validators=("validator-2",))
    play = Edited(monkeypatch, change, seconds=6, cast=TWO_VALIDATORS, first=with_a_newcomer)
    health = perform(play, steps=400)
    assert [said for said in play.signed if said[0] == "validator-1" and said[1] == 1]
    assert [said for said in play.signed if said[0] == "validator-1" and said[1] == 2] == []
    assert [said for said in play.signed if said[0] == "validator-2" and said[1] == 2]
    assert all(verdict is not Verdict.REJECTED for _, _, verdict in play.signed)
    assert nobody_honest_is_rejected(health)
    assert trainer_of(health)["step"] > 3
    (said,) = [one for one in caplog.messages if "the validator rests" in one]
    assert "its owner names" in said
    profile = play._open["validator-1"][0].membership.me.profile
    assert profile.roles == ()
    assert profile.stamp, (
        "whom the document does not name must show its stamp, or is heard by nobody"
    )


@pytest.mark.deep
@pytest.mark.parametrize(
    "changes",
    swept(
        [{"temperature": 0.5}, {"max_new_tokens": 9}, {"submission": 2}, {"surprise": 1e-6}], 1
    ),
    ids=lambda changes: next(iter(changes)),
)
def test_work_of_older_terms_in_every_outbox_accuses_nobody(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest workers were banned after an edition of another temperature."""

    def change(_: Swarm, terms: Terms) -> Terms:
        if "surprise" in changes:
            return replace(terms, limits=replace(terms.limits, surprise=21.0))
        return replace(terms, sampling=replace(terms.sampling, **changes))

    class Restarting(Edited):
        async def hand_out(self, run: Run) -> None:
            await super().hand_out(run)
            self._run = run
            for name in list(self._open):
                if name != "relay-1":
                    kept.append(pending(self._open[name][1]))
                    swarm = self._swarm
                    assert swarm is not None
                    swarm.kill(name)
                    swarm.restart(name)

    kept: list[int] = []
    play = Restarting(monkeypatch, change, seconds=20, first=with_a_newcomer)
    health = perform(play, steps=400)
    assert sum(kept) > 0
    trainer = trainer_of(health)
    assert (trainer["bans"], trainer["liars"]) == ({}, {})
    assert nobody_honest_is_rejected(health)
    assert [epoch for _, epoch, _ in play.signed].count(2) > 3


def pending(roles: Any) -> int:
    """Places in the outbox of an inference node."""
    sessions = [role._session for role in roles if isinstance(role, Inference)]
    return sum(0 if session is None else session.pending for session in sessions)


def test_workers_that_are_admitted_no_longer_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def change(swarm: Swarm, terms: Terms) -> Terms:
        allowed = names(swarm, "relay-1", "inference-1")
        return replace(
            terms, admission=AdmissionRules(mode=AdmissionMode.ALLOW, allowed=allowed)
        )

    play = Edited(monkeypatch, change, seconds=1)

    async def at_once(swarm: Swarm) -> None:
        await play.hand_out(play.edition(swarm))

    play.disturb = at_once  # type: ignore[method-assign]
    perform(play, steps=400)
    (said,) = [one for one in caplog.messages if "rests" in one]
    assert "does not admit" in said


def test_a_removed_trainer_publishes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Edited(monkeypatch, naming(trainers=("relay-1",)), seconds=5)
    health = perform(play, steps=400)
    assert ("trainer-1", 1) in play.published
    assert ("trainer-1", 2) not in play.published
    assert "relay-1" in health


@pytest.mark.parametrize("key", swept(["sampling", "model", "environments"], 1))
def test_an_edition_that_changes_what_engines_are_made_of_stops_roles_until_a_restart(
    key: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of a swarm would work by the old recipe, and be rejected by the other half."""

    def change(_: Swarm, terms: Terms) -> Terms:
        pin = replace(terms.environments[0], digest=bytes(32))
        changed: Any = {
            "sampling": replace(terms.sampling, max_new_tokens=13),
            "model": replace(terms.model, seed=1),
            "environments": (pin,),
        }[key]
        return replace(terms, **{key: changed})

    play = Edited(monkeypatch, change, seconds=5)
    health = perform(play, steps=400)
    assert {epoch for _, epoch in play.published} == {1}
    assert {epoch for _, epoch, _ in play.signed} == {1}
    said = [one for one in caplog.messages if "rests" in one]
    assert len(said) == 4
    assert all(f"changes its {key}: start the node again" in sentence for sentence in said)
    assert health["validator-1"]["epoch"] == 2


def test_limits_may_change_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts follow the limits of the newest edition."""
    used: list[float] = []
    plain = scoring.judge

    def judge(evidence: Evidence, limits: Limits) -> Judgement:
        used.append(limits.surprise)
        return plain(evidence, limits)

    def change(_: Swarm, terms: Terms) -> Terms:
        return replace(terms, limits=replace(terms.limits, surprise=21.0))

    monkeypatch.setattr(scoring, "judge", judge)
    play = Edited(monkeypatch, change, seconds=2)
    perform(play, steps=400)
    assert list(dict.fromkeys(used)) == [20.0, 21.0]
    assert used == sorted(used)


def test_an_edition_that_expires_in_the_middle_stops_all_work_until_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Expiry was looked at when a document came, and never again."""
    at: list[tuple[str, float]] = []
    submitted: list[float] = []

    class Expiring(Edited):
        async def disturb(self, swarm: Swarm) -> None:
            now = swarm.simulation.now
            # Ends 300 s (the tolerance) after its expiry: 3 s from now.
            await self.hand_out(self.edition(swarm, expiry=round(EPOCH + now) - 297))
            await swarm.sleep(4)
            at.append(("expired", swarm.simulation.now))
            await swarm.sleep(5)
            at.append(("renewed", swarm.simulation.now))
            node, _ = self._open["relay-1"]  # one node has it; the others ask each other
            assert await node.book.offer(self.edition(swarm).document)

    real = spine._config
    monkeypatch.setattr(spine, "_config", lambda: replace(real(), run=RunConfig(refresh=2.0)))
    play = Expiring(monkeypatch, nothing, seconds=5)
    produce, publish = InferenceSession.produce, TrainerSession.publish

    async def produced(self: InferenceSession) -> Any:
        submitted.append(self.node.world.now())
        return await produce(self)

    times: list[float] = []

    async def published(self: TrainerSession, step: int) -> None:
        times.append(self.node.world.now())
        await publish(self, step)

    monkeypatch.setattr(InferenceSession, "produce", produced)
    monkeypatch.setattr(TrainerSession, "publish", published)
    health = perform(play, steps=400)
    expired, renewed = at[0][1], at[1][1]
    for moments in (times, submitted):
        assert [moment for moment in moments if moment < expired]
        assert [moment for moment in moments if expired < moment < renewed] == []
        assert [moment for moment in moments if moment > renewed]
    assert [said for said in play.signed if said[2] is Verdict.REJECTED] == []
    assert all(node["in_force"] for node in health.values() if isinstance(node, dict))
    expiry = "has expired: no role works until a newer edition comes"
    assert sum(expiry in line for line in caplog.messages) == len(CAST)
    rest = "rests, the node goes on relaying"
    assert sum(rest in line for line in caplog.messages) == len(CAST) - 1
    assert roles_of(health, "trainer-1")["step"] > 2


@pytest.mark.deep
def test_two_camps_with_two_editions_of_one_epoch_all_learn_of_it_and_meet_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each camp ignored the other's edition in silence, and refused its honest work."""
    camps = {"validator-1": ("validator-1", "inference-1"), "validator-2": ("validator-2",)}
    seen: dict[str, tuple[int, bool]] = {}

    class Torn(Edited):
        async def disturb(self, swarm: Swarm) -> None:
            for judge, camp in camps.items():
                self._next = naming(validators=(judge,))
                self._epoch = 2
                for name in camp:
                    assert await self._open[name][0].book.offer(self.edition(swarm).document)
            await swarm.sleep(5 * REFRESH)
            for name, (node, _) in self._open.items():
                assert node.book.rival is not None, name
                assert node.health()["two_editions"] is True
            swarm.restart("validator-2")
            await swarm.sleep(REFRESH / 2)
            node, _ = self._open["validator-2"]
            assert node.book.rival is not None
            assert node.run.terms.validators == names(swarm, "validator-2")  # type: ignore[attr-defined]
            self._next = nothing
            self._epoch = 3
            assert await self._open["relay-1"][0].book.offer(self.edition(swarm).document)
            await swarm.sleep(5 * REFRESH)
            for name, (node, _) in self._open.items():
                seen[name] = node.run.epoch, node.book.rival is not None

        def edition(self, swarm: Swarm, **changes: Any) -> Run:
            return super().edition(swarm, epoch=self._epoch, **changes)

    real = spine._config
    monkeypatch.setattr(
        spine, "_config", lambda: replace(real(), run=RunConfig(refresh=REFRESH))
    )
    perform(Torn(monkeypatch, nothing, seconds=1, cast=TWO_VALIDATORS), steps=400)
    assert seen == dict.fromkeys(TWO_VALIDATORS, (3, False))
    lives = len(TWO_VALIDATORS) + 1  # one was started again, and its operator is told again
    assert sum("signed two run files" in one for one in caplog.messages) == lives
