"""Issue 10.7: every file of a node, flipped, cut and removed: recovery, or a sentence with the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pytest

from roles.summary import SwarmStatus
from sim.node.swarm import SimNode, Swarm
from tests.simulation.test_roles_faults import CAST, Play, perform, validators

HARM: Final = ("flipped", "cut", "removed")
STEPS: Final = 12


@dataclass(frozen=True)
class Row:
    """One row of the table: the files whose paths match, and what their damage may cost."""

    path: str
    """A pattern for the whole path."""
    kept_by: Sequence[str]
    """Nodes of the cast that have such files."""
    ends: Mapping[str, str] = field(default_factory=dict)
    """By harm: what the sentence says with which the node ends. Otherwise it goes on."""


DIGEST: Final = "[0-9a-f]{64}"
ROWS: Final = {
    row.path: row
    for row in (
        Row("stamp", ("relay-1",)),
        Row("run.shoal", ("inference-1",), {"flipped": "--run", "cut": "--run"}),
        Row("dht/seqno", ("relay-1",)),
        Row("membership/seqno", ("relay-1",)),
        Row("membership/anchors", ("inference-1",)),
        Row("store/[0-9a-f]{16}/v[0-9]{16}-[0-9a-f]{8}[.]policy", ("relay-1", "trainer-1", "inference-1")),
        Row("store/[0-9a-f]{16}/v[0-9]{16}-[0-9a-f]{8}[.]safetensors", ("validator-1", "inference-1")),
        Row("store/[0-9a-f]{16}/roster", ("trainer-1",)),
        Row("store/[0-9a-f]{16}/publishing[.]tmp", ()),
        Row("ledger/[0-9]{8}[.]seg", ("validator-1", "trainer-1"), dict.fromkeys(HARM, "restore the ledger")),
        Row("ledger/synced", ("validator-1", "trainer-1")),
        Row("trainer/checkpoint", ("trainer-1",)),
        Row("trainer/checkpoint[.]previous", ("trainer-1",)),
        Row("trainer/progress[.]json", ("trainer-1",)),
        Row("trainer/weights/[0-9]{8}[.]safetensors", ("trainer-1",)),
        Row("trainer/intake/used[.]json", ("trainer-1",)),
        Row(f"trainer/intake/{DIGEST}", ("trainer-1",)),
        Row(f"validator/accepted/{DIGEST}", ("validator-1",)),
        Row("inference/outbox/[0-9]{10}-[0-9]{10}", ("inference-1",)),
        Row("inference/outbox/cursor", ("inference-1",)),
    )
}
LIVE_ROWS: Final = ("key", "lock", "log", "log[.]1")
"""What a real process has beside these: no simulated node does."""


def harmed(machine: SimNode, path: str, harm: str) -> None:
    disk = machine.disk
    data = disk.read_now(path, 0, None)
    if harm == "removed":
        disk.remove_now(path)
    elif harm == "cut":
        disk.replace_now(path, data[: len(data) * 2 // 3])
    else:
        disk.corrupt(path, min(len(data) // 2, 200))


class Damaged(Play):
    """Row after row, all files of it on one node are changed while the node is down; then it starts again."""

    def __init__(self, rows: Sequence[Row], name: str, harm: str) -> None:
        super().__init__(CAST)
        self._rows, self._name, self._harm = rows, name, harm
        self.damaged: dict[str, int] = {}

    async def disturb(self, swarm: Swarm) -> None:
        machine, relay = swarm.nodes[self._name], self._open["relay-1"][0]
        while relay.shardcast.newest < 2:
            await swarm.sleep(0.02)
        for row in self._rows:
            while not (found := self._found(machine, row)):
                assert relay.shardcast.newest < STEPS, f"there was no {row.path}"
                await swarm.sleep(0.02)
            swarm.kill(self._name)
            for path in found:
                harmed(machine, path, self._harm)
            self.damaged[row.path] = len(found)
            swarm.restart(self._name)
            await swarm.sleep(0.3)

    def _found(self, machine: SimNode, row: Row) -> list[str]:
        return [path for path in machine.disk.paths() if re.fullmatch(row.path, path)]

    async def _play(self, swarm: Swarm, *args: Any) -> SwarmStatus:
        status = await super()._play(swarm, *args)
        for name, (node, _) in self._open.items():
            assert not node.shardcast.halted, f"{name} says that the trainer told two stories"
        self.paths = {path for machine in swarm.nodes.values() for path in machine.disk.paths()}
        return status


def rows_of(name: str, harm: str, *, fatal: bool) -> list[Row]:
    return [row for row in ROWS.values() if name in row.kept_by and (harm in row.ends) == fatal]


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("name", ["relay-1"])
def test_a_node_with_damaged_files_goes_on(name: str, harm: str) -> None:
    """Issue 10.7: nothing is lost but work, nothing honest is rejected, nothing is told twice."""
    rows = rows_of(name, harm, fatal=False)
    play = Damaged(rows, name, harm)
    health = perform(play, steps=STEPS)
    assert list(play.damaged) == [row.path for row in rows]
    assert health["done"] == 1
    assert health["relay-1"]["shardcast"]["newest"] == STEPS
    assert [judge["rejected"] for judge in validators(health)] == [0]
    for path in play.paths:
        assert any(re.fullmatch(row, path) for row in ROWS), f"the table lacks {path}"
