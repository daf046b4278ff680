"""A cheat among whole nodes is banned, by whom and for how long; and a lying validator's ban
ends no honest node's work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import pytest

from p2p.identity import PeerId
from p2p.node.node import Node
from proofs.checks import Reason, Verdict
from roles.demo.cheats import Cheat, CheatConfig, CheatMode
from roles.protocol.core.groups import SignedVerdict
from roles.rl.recipe import Recipe
from roles.run.core.file import Run, sign_run
from roles.shared.bans import bans_of
from roles.validator.judge import Judge
from roles.validator.role import Validator
from roles.validator.verdicts import Job, Ruling
from sim.node.swarm import Swarm
from sim.workloads import spine
from tests.attacks.judged import play

TERM = 10
WORKERS = {f"inference-{number}": "inference" for number in (1, 2)}
CHEATS = {"cheat-1": f"{__name__}:Redrawer"}


class Slanderer(Judge):
    """Rejects honest work, beyond doubt as it says."""

    async def judge(self, job: Job, weights: str) -> Ruling:
        found = await super().judge(job, weights)
        if found.verdict.verdict is not Verdict.ACCEPTED:
            return found
        me, commitment = self.node.host.peer_id, job.submission.commitment
        reason = Reason.DRAW_DISTANCE.value
        said = SignedVerdict(me, commitment, Verdict.REJECTED, reason, 99.0, 0.001, ())
        return Ruling(said.signed(self.node.world.signer))


class SlandererRole(Validator):
    judge_type: ClassVar[type[Judge]] = Slanderer


class Redrawer(Cheat):
    """Draws with seeds of its own, a submission a second."""

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        return cls(CheatConfig(mode=CheatMode.REDRAWN, rest=1.0))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, dict[str, Node]]]:
    """Plays a swarm whose run bans, with as many validators as are called so."""
    real = spine._write_run

    def scene(
        roles: dict[str, str], seconds: float, term: int = TERM
    ) -> tuple[Any, dict[str, Node]]:
        judges = ["validator-1", *(name for name in roles if name.startswith("validator"))]

        def write_run(swarm: Swarm, recipe: Recipe) -> Run:
            keys, run = swarm.simulation.keys, real(swarm, recipe)
            named = tuple(keys.signer(name).peer_id for name in judges)
            terms = replace(run.terms, validators=named, ban_seconds=term)
            return sign_run(terms, keys.signer("owner"))

        monkeypatch.setattr(spine, "_write_run", write_run)
        stages: list[spine.Spine] = []
        health = play(roles, seconds, steps=1000, change=stages.append)
        return health, {name: node for name, (node, _) in stages[0]._open.items()}

    return scene


def rejected(health: Any, judge: str, peer: PeerId) -> int:
    records = health[judge]["roles"]["validator"]["nodes"]
    return int(records[str(peer)]["rejected"]) if str(peer) in records else 0


def test_a_cheat_is_banned_by_all_and_judged_again_only_when_its_ban_has_ended(
    scene: Any,
) -> None:
    """It took 68 rejections before, and was served none the less."""
    seconds = 2.6 * TERM
    health, nodes = scene({**WORKERS, **CHEATS}, seconds)
    cheat, judge = nodes["cheat-1"].peer_id, nodes["validator-1"]
    bans = nodes["validator-1"].ledgers.statements(judge.peer_id, "ban")
    assert 2 <= len(bans) <= 3
    walls = [entry.wall for entry in bans]
    assert all(after - before >= TERM for before, after in pairwise(walls))
    assert len(bans) <= rejected(health, "validator-1", cheat) <= 6 * len(bans)
    refusal = health["cheat-1"]["roles"]["cheat"]["refusal"]
    assert "banned until" in refusal
    assert judge.peer_id.short in refusal
    for name in ("trainer-1", "relay-1"):
        known = nodes[name].ledgers.statements(judge.peer_id, "ban")
        assert known == bans[: len(known)] != []
    honest = health["validator-1"]["roles"]["validator"]
    assert honest["accepted"] > 20
    assert [who for who, _ in bans_of(judge).banned] in ([cheat], [])


def test_three_validators_repeat_a_ban_and_one_that_slanders_ends_nobodys_work(
    scene: Any,
) -> None:
    """The cheat is banned by two that have each run the model on what it handed in; the honest
    workers, whom one validator calls liars, go on with the others."""
    judges = {
        "validator-2": "validator",
        "validator-3": f"{__name__}:SlandererRole",
    }
    more = {f"inference-{number}": "inference" for number in (3, 4)}
    health, nodes = scene({**judges, **WORKERS, **more, **CHEATS}, 35, 300)
    cheat = nodes["cheat-1"].peer_id
    book = bans_of(nodes["trainer-1"])
    held = book.standing(cheat)
    assert held is not None
    assert len(held.by) >= 2
    assert nodes["trainer-1"].shunned.shuns(cheat, held.until - 1)
    honest = {node.peer_id for name, node in nodes.items() if name.startswith("inference")}
    slanderer = nodes["validator-3"].peer_id
    slandered = {
        who for who in honest
        for entry in nodes["trainer-1"].ledgers.statements(slanderer, "ban")
        if who in entry.body
    }  # fmt: skip
    assert slandered, "it was not tried"
    assert all(book.standing(who) is None for who in honest)
    assert all(bans_of(nodes["validator-1"]).standing(who) is None for who in honest)
    accepted = [health[f"validator-{number}"]["roles"]["validator"] for number in (1, 2)]
    assert sum(one["accepted"] for one in accepted) > 5
