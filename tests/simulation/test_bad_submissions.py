"""Workers that sign forged content or wrong claims: each is told why, nothing of it is learnt
from, and the honest nodes of the same swarm do not notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from roles.engines.base import Group
from roles.inference.places import OpenPlace
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.protocol.core.window import Claim
from tests.support.swarm import (
    CAST,
    Health,
    Play,
    nobody_honest_is_rejected,
    perform,
    scored,
    trainer_of,
)


def with_first_proof(group: Group, proof: bytes) -> Group:
    first, *others = group.completions
    return replace(group, completions=(replace(first, proof=proof), *others))


class Forger(Inference):
    """An inference node that changes what it sends, and signs the change."""

    name: ClassVar[str] = "forger"

    def session_type(self, *args: Any) -> InferenceSession:  # type: ignore[override]
        session = ForgingSession(*args)
        session.forger = self
        return session

    def forge_groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return groups

    def forge_claims(self, claims: bytes) -> bytes:
        return claims


class ForgingSession(InferenceSession):
    forger: Forger

    def groups_of(self, place: OpenPlace) -> tuple[Group, ...]:
        return self.forger.forge_groups(super().groups_of(place))

    async def claims(self, place: OpenPlace, groups: Sequence[Group]) -> bytes:
        return self.forger.forge_claims(await super().claims(place, place.groups()))


class Truncated(Forger):
    def forge_groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        proof = groups[0].completions[0].proof[:-1]
        return (with_first_proof(groups[0], proof), *groups[1:])


class Reordered(Forger):
    def forge_groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return groups[::-1]


class Short(Forger):
    def forge_groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return (replace(groups[0], completions=groups[0].completions[:-1]), *groups[1:])


def play(attacker: type[Inference], **parameters: float) -> Health:
    """A swarm of which one worker is an ``attacker``."""
    cast = {name: role for name, role in CAST.items() if name != "inference-2"}
    stage = Play({**cast, "attacker-1": f"{__name__}:{attacker.__name__}"})
    return perform(stage, **{"steps": 3, **parameters})


@pytest.mark.parametrize(
    ("attacker", "reason"),
    [
        (Truncated, "malformed activation proof"),
        (Reordered, "content that is no answer to the tasks of its place"),
        (Short, "content that is no answer to the tasks of its place"),
    ],
)
def test_forged_content_is_rejected_for_what_it_is_and_its_worker_banned(
    attacker: type[Forger], reason: str
) -> None:
    health = play(attacker)
    assert health["done"] == 1
    forged = scored(health, "attacker-1")
    assert forged["accepted"] == 0
    assert set(forged["reasons"]) == {reason}
    assert health["attacker-1"]["peer"] in trainer_of(health)["bans"]
    assert scored(health, "inference-1")["accepted"] > 0
    assert nobody_honest_is_rejected(health)


class Boaster(Forger):
    """Claims spread where there is none, and none where there is, once it is in standing."""

    def forge_claims(self, claims: bytes) -> bytes:
        if self.counts.owed or not self.counts.stood:
            return claims
        turned = {Claim.SPREAD: Claim.ALIKE, Claim.ALIKE: Claim.SPREAD}
        return bytes(turned.get(Claim(claim), claim) for claim in claims)


def test_wrong_claims_end_a_standing_and_teach_nothing() -> None:
    health = play(Boaster, steps=8)
    assert health["done"] == 1
    reasons = scored(health, "attacker-1")["reasons"]
    assert set(reasons) == {"a claim about its rewards is wrong"}
    assert health["attacker-1"]["peer"] not in trainer_of(health)["bans"]
    assert nobody_honest_is_rejected(health)
