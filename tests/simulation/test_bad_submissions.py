"""Workers that break the rules of `/shoal/rollout/1.0.0`: each is told why, none gets anything
accepted, and the honest nodes of the same swarm do not notice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import trio
from roles.validator.judge import GAP, REPLAYED
from roles.validator.replay import OTHER_POLICY, WRONG_GROUPS

from p2p.errors import PeerUnreachable
from p2p.host import request
from p2p.node.node import Node
from roles.engines.base import Group
from roles.inference.role import Inference
from roles.inference.session import InferenceSession
from roles.protocol.core.assignment import REORDER_WINDOW
from roles.protocol.core.groups import (
    ROLLOUT_PROTOCOL,
    Submission,
    content_digest,
    decode_groups_untrusted,
    encode_groups,
)
from roles.run import run_of
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.swarm import open_swarm
from sim.run.scenario import Scenario, load_scenario
from sim.workloads.spine import Spine


def with_first_proof(group: Group, proof: bytes) -> Group:
    first, *others = group.completions
    return replace(group, completions=(replace(first, proof=proof), *others))


class Forger(Inference):
    """An inference node that changes what it sends, and signs the change."""

    name: ClassVar[str] = "forger"

    def make_session(self, *args: Any) -> InferenceSession:
        session = ForgingSession(*args, self.name, self.counts)
        session.forger = self
        return session

    def forge_groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return groups

    def forge(self, honest: Submission) -> dict[str, Any]:
        return {}


class ForgingSession(InferenceSession):
    forger: Forger

    async def produce(self) -> Submission:
        honest = await super().produce()
        groups = self.forger.forge_groups(decode_groups_untrusted(honest.content))
        content = encode_groups(groups)
        fields = {"content": content_digest(content), **self.forger.forge(honest)}
        return Submission.sign(
            replace(honest.commitment, **fields), content, self.node.world.signer
        )


class OtherRun(Forger):
    def forge(self, honest: Submission) -> dict[str, Any]:
        return {"run": b"x" * 32}


class OtherPolicy(Forger):
    def forge(self, honest: Submission) -> dict[str, Any]:
        return {"policy": b"x" * 32}


class Skipper(Forger):
    def forge(self, honest: Submission) -> dict[str, Any]:
        return {"index": honest.commitment.index + REORDER_WINDOW + 1}


class Replayer(Forger):
    """Fills its first place again and again, each time with other content."""

    turn = 0

    def forge_groups(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        self.turn += 1
        proof = groups[0].completions[0].proof + bytes([self.turn % 256])
        return (with_first_proof(groups[0], proof), *groups[1:])

    def forge(self, honest: Submission) -> dict[str, Any]:
        return {"index": 0}


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


class Babbler(Inference):
    """Opens streams to the validator and sends what is no submission at all."""

    name: ClassVar[str] = "babbler"

    async def run(self, node: Node) -> None:
        validator = run_of(node).terms.validators[0]
        await node.shardcast.wait_policy(node.shardcast.newest)
        self.counts.submitted = 1
        for number in range(3):
            await node.locate(validator)
            with pytest.raises((trio.BrokenResourceError, PeerUnreachable)):
                await request(node.host, validator, ROLLOUT_PROTOCOL, bytes(range(number, 200)))
            self.counts.retries += 1
        await trio.sleep_forever()


def play(attacker: type[Inference]) -> Mapping[str, Any]:
    """The spine without its cheat, with ``attacker`` instead; returns every node's health at
    the end.
    """
    cast = {
        "relay-1": "none",
        "trainer-1": "trainer",
        "validator-1": "validator",
        "inference-1": "inference",
        "attacker-1": f"{__name__}:{attacker.__name__}",
    }
    spine = Spine(cast)
    scenario: Scenario = load_scenario("spine").with_changes(nodes=len(cast))
    scenario = replace(
        scenario, parameters={**scenario.parameters, "steps": 3, "kill_at_step": 99}
    )

    async def main(simulation: Simulation) -> dict[str, Any]:
        async with open_swarm(simulation) as swarm:
            metrics = await spine.run(swarm, scenario)
            return {"done": metrics["done"], **spine.health()}

    outcome = run_simulation(main, seed=7, horizon=600)
    assert outcome.value is not None
    return outcome.value


@pytest.mark.parametrize(
    ("attacker", "reason"),
    [
        (OtherPolicy, OTHER_POLICY),
        (Skipper, GAP),
        (Replayer, REPLAYED),
        (Truncated, "malformed activation proof"),
        (Reordered, WRONG_GROUPS),
        (Short, "wrong number of completions"),
    ],
)
def test_a_forged_submission_is_rejected_for_what_it_is(
    attacker: type[Forger], reason: str
) -> None:
    health = play(attacker)
    assert health["done"] == 1
    records = health["validator-1"]["roles"]["validator"]["nodes"]
    forged = records[health["attacker-1"]["peer"]]
    assert forged["accepted"] == 0
    assert reason in forged["reasons"]
    honest = records[health["inference-1"]["peer"]]
    assert honest["rejected"] == 0
    assert honest["accepted"] > 0


def test_a_submission_for_another_run_is_refused_with_a_sentence() -> None:
    health = play(OtherRun)
    assert health["done"] == 1
    refused = health["validator-1"]["roles"]["validator"]["refused"]
    assert list(refused) == ["another run"]
    assert "is for run 787878787878" in health["attacker-1"]["roles"]["forger"]["refusal"]
    assert (
        health["attacker-1"]["peer"] not in health["validator-1"]["roles"]["validator"]["nodes"]
    )


def test_garbage_costs_its_sender_the_stream_and_nobody_else_anything() -> None:
    health = play(Babbler)
    assert health["done"] == 1
    assert health["attacker-1"]["roles"]["babbler"]["retries"] == 3
    assert health["validator-1"]["roles"]["validator"]["rejected"] == 0
