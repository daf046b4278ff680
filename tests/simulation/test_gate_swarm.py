"""The gate in a swarm: liars, floods and kills harm nobody honest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, ClassVar

import pytest
import trio

from p2p.errors import PeerUnreachable
from p2p.identity import PeerId, Signer
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import FrameReader, frame
from proofs.checks import Reason, Verdict
from roles.contract.core.trust import TrustTerms
from roles.engines.fake import FakeEngine
from roles.inference.life import LifeBook
from roles.inference.outbox import Outbox
from roles.inference.windows import SILENT, TOO_OLD, Windows
from roles.protocol.core import answer as msg
from roles.protocol.core.terms import terms_digest
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Claim, SignedWindow, Submission, Window
from roles.protocol.scorer import NOT_HELD, Ruling, Scorer
from roles.trainer import desk
from roles.trainer.core import gate
from roles.trainer.core.buffer import BufferedGroup
from roles.trainer.core.records import Assignment
from roles.trainer.desk import WorkDesk
from roles.trainer.gate_files import GateFiles
from roles.trainer.inbox import Inbox
from roles.trainer.intake import Intake
from roles.trainer.session import TrainerSession
from roles.trainer.taken import TakenPlace
from roles.validator.role import Validator
from roles.validator.session import ValidatorSession
from sim.node.swarm import NodeMain, SimNode, Swarm
from tests.support.gates import FORGER, TRUST, Silent, cast_of, given_up, with_one_listed
from tests.support.swarm import (
    CAST,
    Play,
    finish,
    nobody_honest_is_rejected,
    perform,
    roles_of,
    trainer_of,
)
from tests.sweeps import swept


class StampingSession(ValidatorSession):
    async def judge(self, submission: Submission) -> Ruling:
        honest = await super().judge(submission)
        rewards = honest.rewards or (0.0,)
        return replace(honest, verdict=Verdict.ACCEPTED, reason="", rewards=rewards)


class Stamper(Validator):
    """Accepts everything."""

    session_type: ClassVar[type[ValidatorSession]] = StampingSession


class RefusingSession(ValidatorSession):
    seen = 0
    every = 3

    async def judge(self, submission: Submission) -> Ruling:
        honest = await super().judge(submission)
        self.seen += honest.verdict is Verdict.ACCEPTED
        if self.seen % self.every != 1:
            return honest
        reason = Reason.MANTISSA_MEAN.value
        return Ruling(verdict=Verdict.REJECTED, reason=reason, statistic=900.0, limit=1.0)


class Refuser(Validator):
    """Rejects honest work now and then, beyond doubt."""

    session_type: ClassVar[type[ValidatorSession]] = RefusingSession


class Besieged(Play):
    """Cheats, and honest newcomers, come under fresh names until the liars are convicted."""

    fresh = 0
    most = 24

    async def disturb(self, swarm: Swarm) -> None:
        keys = swarm.simulation.keys
        liars = {
            str(keys.signer(f"validator-{name}").peer_id) for name in ("stamper", "refuser")
        }
        while not liars <= trainer_of(self.health())["liars"].keys() and self.fresh < self.most:
            self.fresh += 1
            swarm.add(f"cheat-{self.fresh}", self._life(FORGER))
            if self.fresh % 2:
                swarm.add(f"inference-{self.fresh + 10}", self._life("inference"))
            await swarm.sleep(1)


@pytest.mark.deep
@pytest.mark.parametrize("seed", swept(range(1, 7), 1))
def test_hostile_validators_are_convicted_and_none_of_their_lies_is_learnt_from(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Audits are more frequent than in earnest; `bench trust` plays the real figures."""
    monkeypatch.setattr(gate, "AUDITS", 0.5)
    for module in (gate, desk):
        monkeypatch.setattr(module, "DUE", 40.0)
    learnt: dict[str, int] = {}
    take = Intake.take

    async def note(self: Intake, place: TakenPlace) -> None:
        who = str(place.verdict.commitment.node)
        learnt[who] = learnt.get(who, 0) + 1
        await take(self, place)

    monkeypatch.setattr(Intake, "take", note)
    honest = dict.fromkeys(("one", "two", "three"), Validator)
    cast = cast_of(workers=3, **honest, stamper=Stamper, refuser=Refuser, silent=Silent)
    play = Besieged(cast, with_one_listed(TRUST))
    health = perform(play, seed=seed, steps=40, seconds=560)
    trainer = trainer_of(health)
    peers = {name: health[name]["peer"] for name in health if name != "done"}
    liars: dict[str, Any] = trainer["liars"]
    assert "false" in liars[peers["validator-stamper"]]
    assert "false" in liars[peers["validator-refuser"]]
    assert not {peers[f"validator-{name}"] for name in honest} & liars.keys()
    banned = {name for name, peer in peers.items() if peer in trainer["bans"]}
    assert banned
    assert all(name.startswith("cheat") for name in banned)
    cheats = {peer for name, peer in peers.items() if name.startswith("cheat")}
    assert not cheats & learnt.keys()
    workers = [health[f"inference-{number}"]["roles"]["inference"] for number in range(1, 4)]
    assert [worker["owed"] for worker in workers] == [0] * 3
    assert trainer["step"] > 5
    assert play.fresh < play.most


class TardySession(StampingSession):
    async def judge(self, submission: Submission) -> Ruling:
        ruling = await super().judge(submission)
        await self.node.shardcast.wait_policy(PolicyVersion(submission.commitment.version + 8))
        return ruling


class Tardy(Stamper):
    """Accepts everything, once the trainer can repeat nothing of it."""

    session_type: ClassVar[type[ValidatorSession]] = TardySession


def test_verdicts_that_nobody_can_repeat_any_more_raise_nobody() -> None:
    cast = {**cast_of(workers=1, tardy=Tardy), "cheat-1": FORGER}
    health = finish(Play(cast, with_one_listed(TRUST)), steps=14, seconds=200)
    assert sum(one["accepted"] for one in roles_of(health, "validator")) > 0
    assert health["cheat-1"]["roles"]["forger"]["stood"] == 0


# Strangers that send windows as fast as they can, and crowds of newcomers


SECONDS = 25


class Flooded(Play):
    """Strangers with keys of their own, and no more than that, come to the trainer."""

    def __init__(self, strangers: int, *, is_slow: bool = False) -> None:
        super().__init__({**CAST, "inference-3": "inference"}, with_one_listed(TRUST))
        self._strangers = strangers
        self._is_slow = is_slow
        self.answers = 0

    async def disturb(self, swarm: Swarm) -> None:
        for number in range(self._strangers):
            swarm.add(f"stranger-{number}", self._flood())

    def _flood(self) -> NodeMain:
        async def live(machine: SimNode) -> None:
            swarm = self._swarm
            assert swarm is not None
            trainer = swarm.nodes["trainer-1"]
            async with machine.open_host() as host, trio.open_nursery() as nursery:
                host.add_addrs(trainer.peer_id, (trainer.addr,))
                for number in range(4):
                    nursery.start_soon(self._send, machine, host, trainer.peer_id, number)

        return live

    async def _send(self, machine: SimNode, host: Any, trainer: PeerId, number: int) -> None:
        run = self._run
        assert run is not None
        claims = bytes([Claim.SPREAD] * run.terms.sampling.submission)
        first = 0
        while True:
            shardcast = self._open["trainer-1"][0].shardcast
            version = PolicyVersion(max(0, shardcast.newest))
            policy = shardcast.manifest(version).weights_digest
            head = run.id, terms_digest(run), machine.peer_id, version, policy  # type: ignore[attr-defined]
            window = Window(*head, first, (bytes(31) + bytes([number]),), claims)
            signed = SignedWindow.sign(window, machine.world.signer)
            try:
                async with await host.open_stream(trainer, msg.WORK_PROTOCOL) as stream:
                    if self._is_slow:
                        await machine.world.sleep(30)
                    await stream.send_all(frame(msg.encode_request(msg.WindowRequest(signed))))
                    data = await FrameReader(stream, msg.MAX_ANSWER + 1024).receive()
                    reply = None if data is None else msg.decode_reply_untrusted(data, None)
                    self.answers += isinstance(reply, msg.Answer)
                    first += isinstance(reply, msg.Answer)
            except (trio.BrokenResourceError, PeerUnreachable):
                await machine.world.sleep(0.1)


@pytest.mark.deep
@pytest.mark.parametrize("is_slow", swept([False, True], 1))
def test_strangers_take_at_most_a_fifth_of_honest_acceptances(is_slow: bool) -> None:
    quiet = trainer_of(perform(Flooded(0), steps=400, seconds=SECONDS))
    play = Flooded(100, is_slow=is_slow)
    health = perform(play, steps=400, seconds=SECONDS)
    flooded = trainer_of(health)
    assert is_slow or play.answers > 100
    assert nobody_honest_is_rejected(health)
    assert flooded["submissions_taken"] >= 0.8 * quiet["submissions_taken"] > 20


class Crowded(Play):
    """Many newcomers, whom the trainer has to score itself, beside one in standing."""

    def __init__(self, newcomers: int) -> None:
        names = [f"inference-{number}" for number in range(1, newcomers + 2)]
        cast = {"relay-1": "none", "trainer-1": "trainer", **dict.fromkeys(names, "inference")}
        trust = TrustTerms(share=0.25, probation=10_000, window=4)
        super().__init__(cast, with_one_listed(trust))


@pytest.mark.deep
def test_newcomers_do_not_starve_those_in_standing_at_the_trainers_scorer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With twelve of them one place in thirteen was learnt from."""
    check = Scorer._check

    async def slow(self: Scorer, *args: Any) -> Any:
        await self._node.world.sleep(0.15)
        return await check(self, *args)

    monkeypatch.setattr(Scorer, "_check", slow)
    ratios = []
    for seed in (1, 2, 3):  # single seeds scatter from 0.6 to 1.4
        alone = trainer_of(perform(Crowded(0), seed, steps=400, seconds=SECONDS))
        among = trainer_of(perform(Crowded(12), seed, steps=400, seconds=SECONDS))
        assert alone["submissions_taken"] > 20
        assert among["accepted"] > among["submissions_taken"]  # newcomers get their share
        ratios.append(among["submissions_taken"] / alone["submissions_taken"])
    assert median(ratios) >= 0.7


# Kills on the path of work


POINTS: list[tuple[str, Any, str, bool]] = [
    ("trainer-1", GateFiles, "write", False),
    ("trainer-1", GateFiles, "write", True),
    ("trainer-1", WorkDesk, "_answer_window", False),
    ("trainer-1", Scorer, "score", False),
    ("trainer-1", Scorer, "score", True),
    ("trainer-1", Intake, "take", False),
    ("trainer-1", Inbox, "keep", True),
    ("trainer-1", Intake, "take", True),
    ("trainer-1", WorkDesk, "_conclude", True),
    ("trainer-1", WorkDesk, "_audit", False),
    ("trainer-1", WorkDesk, "_audit", True),
    ("trainer-1", WorkDesk, "_keep_proof", False),
    ("trainer-1", WorkDesk, "_keep_proof", True),
    ("trainer-1", FakeEngine, "save", False),
    ("trainer-1", TrainerSession, "publish", False),
    ("trainer-1", Inbox, "forget_all_but", False),
    ("inference-2", Outbox, "add", False),
    ("inference-2", Outbox, "sign", False),
    ("inference-2", Outbox, "sign", True),
    ("inference-2", Windows, "_ask", True),
    ("inference-2", Windows, "send", True),
    ("inference-2", LifeBook, "settle", True),
    ("inference-2", Outbox, "settle", True),
    ("validator-1", ValidatorSession, "judge", True),
    ("validator-1", ValidatorSession, "_record", False),
    ("validator-1", ValidatorSession, "_enter", False),
    ("validator-1", ValidatorSession, "_enter", True),
    ("validator-1", ValidatorSession, "_deliver", False),
]
"""Who is killed, in which step, and whether after it."""
HARMLESS = {TOO_OLD, SILENT, NOT_HELD, "the run has all its steps"}
"""Why a place may be given up."""


class Killed(Play):
    """One node is killed each time that it comes to a point, and started again."""

    def __init__(self, cast: dict[str, str], victim: str, times: Sequence[int]) -> None:
        super().__init__(cast, with_one_listed(TRUST))
        self._victim = victim
        self._times = times
        self._calls = 0
        self._here = trio.Event()
        self.kills = 0

    def owns(self, thing: object) -> bool:
        """Return True if ``thing`` is the victim's."""
        node = getattr(thing, "node", None) or getattr(thing, "_node", None)
        world = getattr(thing, "_world", None) if node is None else node.world
        return bool(world.name == self._victim)

    def stop(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool) -> None:
        plain = getattr(owner, name)

        async def step(of: object, *args: Any, **kwargs: Any) -> Any:
            if not self.owns(of):
                return await plain(of, *args, **kwargs)
            self._calls += 1
            is_last = self._calls in self._times
            value = await plain(of, *args, **kwargs) if after or not is_last else None
            if is_last:
                self._here.set()
                await trio.sleep_forever()
            return value

        monkeypatch.setattr(owner, name, step)

    async def disturb(self, swarm: Swarm) -> None:
        for _ in self._times:
            with trio.move_on_after(60):
                await self._here.wait()
            if not self._here.is_set():
                return
            self._here = trio.Event()
            swarm.kill(self._victim, torn=True)
            self.kills += 1
            await swarm.sleep(0.5)
            swarm.restart(self._victim)


@pytest.mark.parametrize("times", swept([(2, 4), (1, 3), (5, 6)], 1))
@pytest.mark.parametrize(
    ("victim", "owner", "name", "after"),
    swept(POINTS, 2),
    ids=lambda one: one if isinstance(one, str) else getattr(one, "__name__", str(one)),
)
def test_a_kill_anywhere_on_the_path_of_work_changes_nothing_that_was_said(
    victim: str, owner: Any, name: str, after: bool, times: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gate, "AUDITS", 0.6)
    said: dict[bytes, set[tuple[tuple[int, ...], str]]] = {}
    accepted: dict[str, set[bytes]] = {}
    reasons = given_up(monkeypatch)
    used: dict[int, list[tuple[bytes, int]]] = {}
    answer, sign = WorkDesk._answer_window, SignedVerdict.signed
    wait = Intake.wait_groups

    async def answer_window(self: WorkDesk, window: Window, given: Assignment) -> Any:
        if window.contents:
            said.setdefault(window.digest, set()).add((given.wanted, str(given.scorer)))
        return await answer(self, window, given)

    def signed(self: SignedVerdict, signer: Signer) -> SignedVerdict:
        if self.verdict is Verdict.ACCEPTED:
            accepted.setdefault(str(self.commitment.node), set()).add(self.commitment.digest)
        return sign(self, signer)

    async def wait_groups(self: Intake, count: int) -> list[BufferedGroup]:
        taken = await wait(self, count)
        used[self._step] = [(group.source, group.number) for group in taken]
        return taken

    monkeypatch.setattr(WorkDesk, "_answer_window", answer_window)
    monkeypatch.setattr(SignedVerdict, "signed", signed)
    monkeypatch.setattr(Intake, "wait_groups", wait_groups)
    cast = {**CAST, "inference-3": "inference"}
    if name == "_keep_proof":
        cast["cheat-1"], times = FORGER, (1,)
    play = Killed(cast, victim, times)
    play.stop(monkeypatch, owner, name, after)
    health = finish(play, steps=12, seconds=150)
    assert play.kills
    trainer = trainer_of(health)
    assert (trainer["liars"], trainer["lies"]) == ({}, 0)
    assert {len(answers) for answers in said.values()} == {1}
    assert set(reasons) <= HARMLESS, reasons
    times_used = Counter(key for keys in used.values() for key in keys)
    assert set(times_used.values()) == {1}
    for number in (2, 3):
        worker = health[f"inference-{number}"]
        state = worker["roles"]["inference"]
        assert state["owed"] == 0
        assert state["stood"] <= len(accepted[worker["peer"]])
