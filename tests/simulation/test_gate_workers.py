"""The worker's side of the gate: what it does when it is refused, or when one side has lost
what it knew."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from roles.inference.windows import Windows
from roles.protocol.core.answer import Answer, Refused
from roles.protocol.core.window import SignedWindow
from sim.node.swarm import Swarm
from tests.support.gates import FORGER
from tests.support.swarm import Play, nobody_honest_is_rejected, perform, trainer_of

TWO = {"relay-1": "none", "trainer-1": "trainer"}
NEWCOMERS = {**TWO, "inference-1": "inference", "inference-2": "inference"}


@pytest.mark.deep
def test_a_banned_worker_asks_seldom_draws_nothing_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[float, object]] = []
    plain = Windows._ask

    async def ask(self: Windows, signed: SignedWindow) -> Answer | Refused | None:
        reply = await plain(self, signed)
        if self._node.world.name == "cheat-1":
            asked.append((self._node.world.now(), reply))
        return reply

    monkeypatch.setattr(Windows, "_ask", ask)
    cast = {**TWO, "inference-1": "inference", "cheat-1": FORGER}
    health = perform(Play(cast), steps=400, seconds=60)
    cheat = health["cheat-1"]["roles"]["forger"]
    assert health["cheat-1"]["peer"] in trainer_of(health)["bans"]
    assert "the trainer refuses this node's work: this name is banned" in cheat["now"]
    refused = [when for when, reply in asked if isinstance(reply, Refused)]
    pauses = [later - when for when, later in pairwise(refused)]
    assert 3 <= len(refused) <= 9
    assert pauses[-1] > 9
    assert cheat["submitted"] < 20


@pytest.mark.parametrize("who", ["trainer", "worker"])
def test_who_loses_what_it_knew_of_places_goes_on_where_the_other_is(who: str) -> None:
    """Of newcomers alone there is no next version to begin again with."""

    class Forgetful(Play):
        async def _play(self, swarm: Swarm, *rest: Any) -> Any:
            trainer = swarm.nodes["trainer-1"]
            while not any("gate/name" in path for path in trainer.disk.paths()):
                await swarm.sleep(0.1)
            await swarm.sleep(0.3)
            if who == "trainer":
                swarm.kill("trainer-1")
                for path in trainer.disk.paths():
                    if "gate/name" in path:
                        trainer.disk.remove_now(path)
                await swarm.sleep(1)
                swarm.restart("trainer-1")
            else:
                for name in ("inference-1", "inference-2"):
                    swarm.kill(name)
                    disk = swarm.nodes[name].disk
                    for path in disk.paths():
                        if "outbox" in path:
                            disk.remove_now(path)
                    swarm.restart(name)
            return await super()._play(swarm, *rest)

    health = perform(Forgetful(NEWCOMERS), steps=3, seconds=120)
    assert health["done"] == 1
    assert nobody_honest_is_rejected(health)
