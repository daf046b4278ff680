"""What a volunteer is told of its work, over kills and with the trainer away."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from roles.contract.core.sampling import SamplingTerms
from roles.own.status import SwarmStatus
from sim.node.swarm import Swarm
from sim.run.scenario import Scenario
from tests.support.swarm import CAST, Play, perform

ROOT = Path(__file__).parent.parent.parent
FATES = ("learnt", "no_spread", "stale", "left_over", "waiting")


class Lives(Play):
    """One worker is killed again and again, and the trainer is away for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Mapping[str, Any]] = []
        """Healths of the worker."""
        self.said: list[str] = []

    async def _play(
        self, swarm: Swarm, scenario: Scenario, sampling: SamplingTerms
    ) -> SwarmStatus:
        machine, world = swarm.nodes["inference-1"], swarm.nodes["relay-1"].world
        rng = world.rng("kills")
        status, left_at = self._status(sampling), 0.0
        while swarm.simulation.now < scenario.duration and not status.done:
            await world.sleep(rng.uniform(0.05, 0.9))
            status = self._status(sampling)
            self._look(status)
            if left_at == 0 and status.trainer.get("step", 0) >= 4:
                left_at = swarm.simulation.now
                swarm.kill("trainer-1")
            elif left_at and "trainer-1" not in {node.name for node in swarm.alive}:
                if swarm.simulation.now > left_at + 60:
                    swarm.restart("trainer-1")
            elif machine in swarm.alive:
                swarm.kill("inference-1", torn=rng.random() < 0.5)
                await world.sleep(0.3)
                swarm.restart("inference-1")
                await world.sleep(rng.uniform(0.5, 4.0))
        await world.sleep(20)  # the account of the last step is asked for
        self._look(status := self._status(sampling))
        return status

    def _look(self, status: SwarmStatus) -> None:
        health = status.nodes["inference-1"]["roles"]["inference"]
        self.seen.append(health)
        self.said.append(status.nodes["inference-2"]["roles"]["inference"]["now"])


@pytest.fixture(scope="module")
def lives() -> tuple[Lives, Mapping[str, Any]]:
    play = Lives()
    health = perform(play, seed=5, steps=8, seconds=400)
    assert health["done"]
    return play, health


def test_accepted_work_is_never_more_than_was_made_in_all_lives(
    lives: tuple[Lives, Mapping[str, Any]],
) -> None:
    """After a restart a worker showed 13,056 made and 13,312 accepted."""
    play, health = lives
    counted = [one["life"] for one in play.seen if one["life"]["made"]]
    assert len(counted) > 20
    for life in counted:
        judged = life["accepted"] + life["rejected"] + life["inconclusive"]
        assert judged <= life["made"] <= judged + 4 * 32, life
    accepted = [life["accepted"] for life in counted]
    assert accepted == sorted(accepted), "no life forgets what another had accepted"
    here = health["inference-1"]["roles"]["inference"]["accepted"]
    assert 32 * here < counted[-1]["accepted"], "work of earlier lives is counted"


def test_a_worker_is_told_what_was_learnt_from_its_work_and_why_not_from_the_rest(
    lives: tuple[Lives, Mapping[str, Any]],
) -> None:
    """An accepted rollout looked like a learnt one."""
    _, health = lives
    names = [name for name in CAST if "inf" in name]
    workers = [health[name]["roles"]["inference"]["life"] for name in names]
    by_validator = health["validator-1"]["roles"]["validator"]["nodes"]
    trainer = health["trainer-1"]["roles"]["trainer"]
    for name, life in zip(names, workers, strict=True):
        on_probation = 32 * by_validator[str(health[name]["peer"])]["accepted"]
        told = sum(life[fate] for fate in FATES)
        taken = life["accepted"] - on_probation
        assert taken - 32 * 5 <= told <= taken, life
        assert life["learnt"] > 0
    assert sum(life["learnt"] for life in workers) == 8 * trainer["groups_used"]
    assert sum(life["share"] for life in workers) == pytest.approx(1)
    for fate in FATES:
        assert sum(life[fate] for life in workers) == 8 * trainer["groups"][fate], fate


def test_a_worker_says_what_it_waits_for(lives: tuple[Lives, Mapping[str, Any]]) -> None:
    """The line froze while the trainer was away."""
    play, _ = lives
    said = "\n".join(play.said)
    assert "the trainer is away since " in said
    assert "; your work is kept" in said or "; nothing is lost" in said
    assert "waiting for the first policy: the trainer warms up" in said
    assert play.said[-1] == "the run has all its steps: this node only relays"


def test_the_page_names_every_key_of_a_status(lives: tuple[Lives, Mapping[str, Any]]) -> None:
    """Whoever reads ``--status`` had to guess."""
    table = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- status:.*?-->\n(.*?)\n\n", table, re.DOTALL)
    assert found is not None
    named: dict[str, set[str]] = {}
    for row in found.group(1).splitlines()[2:]:
        of, keys = row.strip("| ").split(" | ", 1)
        plain = re.sub(r"\([^()]*\)", "", keys)
        for one in of.split(", "):
            named.setdefault(one.strip("`"), set()).update(re.findall(r"`(\w+)`", plain))
    _, health = lives
    roles = {name: role for name in CAST for name, role in health[name]["roles"].items()}
    said = {
        "the node": health["trainer-1"],
        "shardcast": health["trainer-1"]["shardcast"],
        "life": roles["inference"]["life"],
        **roles,
    }
    assert named == {of: set(keys) for of, keys in said.items()}
    json.dumps(health)
