"""Workers that break the rules of `/shoal/work/1.0.0`: each is told why, nothing of it is
learnt from, and the honest nodes of the same swarm do not notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import trio

from p2p.errors import PeerUnreachable
from p2p.host import request
from p2p.node.node import Node
from roles.contract import run_of
from roles.engines.base import Group
from roles.inference.places import OpenPlace
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.protocol.core.answer import (
    MAX_ANSWER,
    WORK_PROTOCOL,
    Answer,
    Refused,
    WindowRequest,
    decode_reply_untrusted,
    encode_request,
)
from roles.protocol.core.terms import terms_digest
from roles.protocol.core.window import Claim, SignedWindow, Window
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


class Asker(Inference):
    """Sends windows of its own making, and keeps what it is told."""

    name: ClassVar[str] = "asker"
    told: ClassVar[dict[str, object]] = {}

    async def run(self, node: Node) -> None:
        run = run_of(node)
        await node.shardcast.wait_policy(node.shardcast.newest + 1)
        version = node.shardcast.newest
        policy = node.shardcast.manifest(version).weights_digest
        claims = bytes([Claim.SPREAD] * run.terms.sampling.submission)
        honest = Window(
            *(run.id, terms_digest(run), node.peer_id, version, policy, 0),
            *((bytes(32),), claims),
        )
        forged = {
            "another run": replace(honest, run=b"x" * 32),
            "another node": replace(honest, node=run.terms.trainers[0]),
            "other terms": replace(honest, terms=b"x" * 32),
            "a version to come": replace(honest, version=version + 1000),
            "another policy": replace(honest, policy=b"x" * 32),
            "a gap": replace(honest, first=3),
            "too few claims": replace(honest, claims=claims[:-1]),
            "honest": honest,
            "the same": honest,
            "other content": replace(honest, contents=(b"x" * 32,)),
        }
        for name, window in forged.items():
            signed = SignedWindow.sign(window, node.world.signer)
            self.told[name] = await self._ask(node, encode_request(WindowRequest(signed)))
        wrong = SignedWindow(replace(honest, first=1), bytes(64))
        with pytest.raises((trio.BrokenResourceError, PeerUnreachable)):
            await self._ask(node, encode_request(WindowRequest(wrong)))
        for number in range(3):
            with pytest.raises((trio.BrokenResourceError, PeerUnreachable)):
                await self._ask(node, bytes(range(number, 200)))
            self.counts.retries += 1
        await trio.sleep_forever()

    async def _ask(self, node: Node, asked: bytes) -> object:
        trainer = run_of(node).terms.trainers[0]
        await node.locate(trainer)
        data = await request(
            node.host, trainer, WORK_PROTOCOL, asked, max_reply=MAX_ANSWER + 1024
        )
        return decode_reply_untrusted(data, node.world.verify)


def test_windows_that_break_a_rule_are_refused_with_a_sentence_and_blame_nobody() -> None:
    Asker.told.clear()
    health = play(Asker, steps=6)
    assert health["done"] == 1
    told = dict(Asker.told)
    answers = [told.pop("honest"), told.pop("the same")]
    assert all(isinstance(one, Answer) and one.wanted == (0,) for one in answers)
    words = {
        "another run": "start the node with that run",
        "another node": "from the node that signed it",
        "other terms": "do not hold any more",
        "a version to come": "the newest policy is",
        "another policy": "another policy",
        "a gap": "",
        "too few claims": "groups, not",
        "other content": "",
    }
    assert told.keys() == words.keys()
    for name, reply in told.items():
        assert isinstance(reply, Refused), (name, reply)
        assert words[name] in reply.reason
    assert scored(health, "attacker-1")["rejected"] == 0
    assert health["attacker-1"]["peer"] not in trainer_of(health)["bans"]
    assert health["attacker-1"]["roles"]["asker"]["retries"] == 3
