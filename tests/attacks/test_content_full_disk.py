"""A full disk ends no node that can go on reading: relays and roles live on."""

from __future__ import annotations

from typing import Any

import pytest

from sim.node.disk import MAX_FILE
from sim.node.swarm import SimNode, Swarm
from sim.workloads import spine
from tests.support.swarm import Health, Play, perform


class FullDisks(Play):
    """The disks of ``who`` are full for ten minutes once the first policy is out."""

    def __init__(self, *who: str) -> None:
        super().__init__()
        self.who = who
        self.during: Health = {}
        self.step_when_full = 0

    async def disturb(self, swarm: Swarm) -> None:
        for name in self.who:
            swarm.nodes[name].disk.limit(0)
        self.step_when_full = self.health()["trainer-1"]["roles"]["trainer"]["step"]
        await swarm.sleep(600.0)  # ten minutes
        self.during = self.health()
        for name in self.who:
            swarm.nodes[name].disk.limit(MAX_FILE)


@pytest.fixture(autouse=True)
def no_service_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its disk ends stays ended, as the test then says."""

    async def end_for_good(node: SimNode, process: Any) -> None:
        await process(node)

    monkeypatch.setattr(spine, "supervise", end_for_good)


@pytest.mark.deep
def test_a_relay_with_a_full_disk_serves_what_it_holds_and_catches_up() -> None:
    course = FullDisks("relay-1")
    end = perform(course, seed=5, steps=4, seconds=1200)
    during = course.during["relay-1"]["shardcast"]
    assert during["disk_refuses"]
    assert during["newest"] < 4 == course.during["trainer-1"]["shardcast"]["newest"]
    assert end["done"] == 1
    assert end["relay-1"]["shardcast"]["newest"] == 4
    assert not end["relay-1"]["shardcast"]["disk_refuses"]


def test_roles_with_full_disks_wait_and_lose_nothing() -> None:
    who = ("trainer-1", "validator-1", "inference-1", "inference-2")
    course = FullDisks(*who)
    end = perform(course, seed=5, steps=6, seconds=1200)
    roles = {name: course.during[name]["roles"][name.partition("-")[0]] for name in who}
    assert roles["trainer-1"]["step"] <= course.step_when_full + 1
    assert any(role["waits_for_disk"] for role in roles.values())
    assert end["done"] == 1
    after = end["validator-1"]["roles"]["validator"]
    assert after["rejected"] == 0 < after["accepted"]
    assert not any(end[name]["roles"][name.partition("-")[0]]["waits_for_disk"] for name in who)
