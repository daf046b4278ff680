"""Every file of a node, flipped, cut and removed: recovery, or a sentence with the
remedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from p2p.errors import ShoalError
from roles.own.status import SwarmStatus
from sim.errors import NodeFailed
from sim.node.swarm import NodeMain, SimNode, Swarm
from sim.workloads import spine
from tests.support.swarm import CAST, Play, nobody_honest_is_rejected, perform
from tests.sweeps import swept

HARM: Final = ("flipped", "cut", "removed")
STEPS: Final = 16


@dataclass(frozen=True)
class Row:
    """One row of the table: the files whose paths match, and what their damage may cost."""

    told: str
    """How the table of docs/operating.md calls them."""
    path: str
    """A pattern for the whole path."""
    kept_by: Sequence[str]
    """Nodes of the cast that have such files."""
    planted: bool = False
    """Whether a crash must have come at the right moment to leave one: then it is made here."""
    ends: Mapping[str, str] = field(default_factory=dict, hash=False)
    """By harm: what the sentence says with which the node ends. Otherwise it goes on."""


DIGEST: Final = "[0-9a-f]{64}"
STORE: Final = "store/[0-9a-f]{16}"
ROWS: Final = (
    Row("stamp", "stamp", ("relay-1",)),
    Row("run.shoal", "run.shoal", ("inference-1",), ends={"flipped": "--run", "cut": "--run"}),
    Row("run.id", "run[.]id", ("inference-1", "validator-1")),
    Row("dht/seqno", "dht/seqno", ("relay-1",)),
    Row("membership/seqno", "membership/seqno", ("relay-1",)),
    Row("membership/anchors", "membership/anchors", ("inference-1",)),
    Row(
        "store/RUN/*.policy",
        f"{STORE}/v[0-9]{{16}}-[0-9a-f]{{8}}[.]policy",
        ("relay-1", "inference-1"),
    ),
    Row("store/RUN/*.policy", f"{STORE}/v[0-9]{{16}}-[0-9a-f]{{8}}[.]policy", ("trainer-1",),
        ends=dict.fromkeys(HARM, "restore that folder")),
    Row("store/RUN/*.part", f"{STORE}/v[0-9]{{16}}-[0-9a-f]{{8}}[.]part", ("relay-1",)),
    Row("store/RUN/*.safetensors", f"{STORE}/v[0-9]{{16}}-[0-9a-f]{{8}}[.]safetensors",
        ("validator-1",)),
    Row("store/RUN/*.patch", f"{STORE}/v[0-9]{{16}}-[0-9a-f]{{8}}[.]patch", ("trainer-1",)),
    Row("store/RUN/roster", f"{STORE}/roster", ("trainer-1",)),
    Row("store/RUN/publishing.tmp", f"{STORE}/publishing[.]tmp", ("trainer-1",), planted=True),
    Row("ledger/*.seg", "ledger/[0-9]{8}[.]seg", ("validator-1", "trainer-1"),
        ends=dict.fromkeys(HARM, "restore the ledger")),
    Row("ledgers/*", "ledgers/12D3[A-Za-z0-9]*", ("inference-1",)),
    Row("ledger/synced", "ledger/synced", ("validator-1", "trainer-1")),
    Row("learner.toml", "learner[.]toml", ()),  # its owner's: tests/unit/test_learner_toml.py
    Row("trainer/checkpoint", "trainer/checkpoint", ("trainer-1",)),
    Row(".previous", "trainer/checkpoint[.]previous", ("trainer-1",)),
    Row("trainer/accounts.json", "trainer/accounts[.]json", ("trainer-1",)),
    Row("trainer/progress.json", "trainer/progress[.]json", ("trainer-1",)),
    Row("trainer/weights/*", "trainer/weights/[0-9]{8}[.]safetensors", ("trainer-1",)),
    Row("trainer/intake/used.json", "trainer/intake/used[.]json", ("trainer-1",)),
    Row("trainer/intake/*", f"trainer/intake/{DIGEST}", ("trainer-1",)),
    Row("trainer/gate/*", "trainer/gate/(name|validator)-[0-9a-f]+", ("trainer-1",)),
    Row("trainer/gate-secret", "trainer/gate-secret", ("trainer-1",)),
    Row("trainer/gate-served", "trainer/gate-served", ("trainer-1",)),
    Row("validator/kept/*", f"validator/kept/{DIGEST}", ("validator-1",), planted=True),
    Row("inference/outbox/place-*", "inference/outbox/place-[0-9]{10}-[0-9]{10}",
        ("inference-1",)),
    Row("inference/outbox/window-*", "inference/outbox/window-[0-9]{10}-[0-9]{10}",
        ("inference-1",)),
    Row("inference/life", "inference/life", ("inference-1",)),
    Row("inference/outbox/cursor", "inference/outbox/cursor", ("inference-1",)),
)  # fmt: skip


ELSEWHERE: Final = {
    "model/*": "../unit/test_model_fetch.py::"
    "test_what_has_rotted_or_was_pinned_by_another_edition_does_not_stay",
    "engine/*": "test_engine_deaths.py::"
    "test_killed_between_writing_and_reading_it_leaves_nothing",
    "trainer/metrics.jsonl": "../unit/test_metrics.py"
    "::test_a_line_that_a_crash_cut_off_spoils_no_other",
    "page.json": "../unit/test_dashboard.py::test_a_node_that_has_stopped_has_left_its_page",
    "run.rival": "../unit/test_rundoc.py::test_a_file_that_is_no_rival_is_removed",
    "trainer/evidence/*": "../unit/test_gate.py::"
    "test_convictions_open_and_what_does_not_fit_convicts_nobody",
    "key": "test_files_start.py::test_a_key_that_is_damaged_ends_a_node_with_a_sentence",
    "lock": "test_files_start.py::test_a_node_starts_whatever_became_of_its_lock_and_its_logs",
    "store/RUN/lock": "test_content_policies.py::test_two_pulls_into_one_folder_do_not_meet",
    "log": "test_files_start.py::test_a_node_starts_whatever_became_of_its_lock_and_its_logs",
    "log.1": "test_files_start.py::test_a_node_starts_whatever_became_of_its_lock_and_its_logs",
    "work.stamp": "test_files_trust.py::test_a_stamp_that_has_changed_is_made_again",
    "pass": "test_files_trust.py::test_a_pass_that_has_changed_admits_nobody_and_ends_no_node",
    "guests/*": "test_files_trust.py::test_a_guest_whose_file_has_changed_is_counted_anew",
    "paused": "test_files_trust.py::test_a_pause_is_a_file_whatever_is_in_it",
    "ledger/": "test_files_start.py::test_a_ledger_that_is_gone_as_a_whole_is_not_missed",
}
"""Tests of the rows that no simulated node can play: a real process has a lock and logs."""


def harmed(machine: SimNode, path: str, harm: str) -> None:
    disk = machine.disk
    data = disk.read_now(path, 0, None)
    if harm == "removed":
        disk.remove_now(path)
    elif harm == "cut":
        disk.replace_now(path, data[: len(data) * 2 // 3])
    else:
        disk.corrupt(path, min(len(data) // 2, 200))


def leaves(error: BaseException | None) -> list[BaseException]:
    """What ended a node, out of its groups."""
    if isinstance(error, NodeFailed):
        return leaves(error.__cause__)
    if not isinstance(error, BaseExceptionGroup):
        return [] if error is None else [error]
    return [leaf for part in error.exceptions for leaf in leaves(part)]


class Damaged(Play):
    """Row after row, all files of it on one node are changed while the node is down; then it
    starts again.
    """

    def __init__(self, rows: Mapping[Row, str], name: str) -> None:
        """``rows``, each with its harm."""
        super().__init__(CAST)
        self._rows, self._name = rows, name
        self.damaged: dict[str, int] = {}

    async def disturb(self, swarm: Swarm) -> None:
        machine, relay = swarm.nodes[self._name], self._open["relay-1"][0]
        while relay.shardcast.newest < 2:
            await swarm.sleep(0.02)
        for row, harm in self._rows.items():
            if row.planted:
                stored = next(path for path in machine.disk.paths() if re.match(STORE, path))
                planted = f"{stored.rpartition('/')[0]}/publishing.tmp"
                if row.told.startswith("validator"):
                    planted = f"validator/kept/{'0' * 64}"
                machine.disk.replace_now(planted, bytes(1000))
            while not (found := self._found(machine, row)):
                assert relay.shardcast.newest < STEPS, f"there was no {row.path}"
                await swarm.sleep(0.02)
            for path in found:
                machine.disk.sync_now(path)  # as a system does within seconds
            swarm.kill(self._name)
            for path in found:
                harmed(machine, path, harm)
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


def survived(name: str, turn: int) -> dict[Row, str]:
    """The rows of a node, each with one harm that does not end it: with another each turn."""
    found = {}
    for number, row in enumerate(ROWS):
        harms = [harm for harm in HARM if harm not in row.ends]
        if name in row.kept_by and harms:
            found[row] = harms[(number + turn) % len(harms)]
    return found


@pytest.mark.parametrize("turn", swept(range(len(HARM)), 1))
@pytest.mark.parametrize(
    "name", swept(["trainer-1", "relay-1", "validator-1", "inference-1"], 1)
)
def test_a_node_with_damaged_files_goes_on(name: str, turn: int) -> None:
    """Nothing is lost but work, nothing honest is rejected, nothing is told
    twice.
    """
    rows = survived(name, turn)
    play = Damaged(rows, name)
    health = perform(play, steps=STEPS)
    assert list(play.damaged) == [row.path for row in rows]
    assert health["done"] == 1
    assert health["relay-1"]["shardcast"]["newest"] == STEPS
    assert nobody_honest_is_rejected(health)
    for path in play.paths:
        assert any(re.fullmatch(row.path, path) for row in ROWS), f"the table lacks {path}"


FATAL: Final = [
    (name, row, harm)
    for name in ("inference-1", "validator-1", "trainer-1")
    for row in ROWS
    if row.ends and name in row.kept_by
    for harm in swept(list(row.ends), 1)
]


@pytest.mark.parametrize(
    ("name", "row", "harm"),
    FATAL,
    ids=lambda value: value.path if isinstance(value, Row) else value,
)
def test_a_node_that_cannot_go_on_says_what_to_do(
    name: str, row: Row, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence with the remedy, and no other kind of exception."""

    async def once(node: SimNode, process: NodeMain) -> None:
        await process(node)

    monkeypatch.setattr(spine, "supervise", once)
    play = Damaged({row: harm}, name)
    with pytest.raises((NodeFailed, BaseExceptionGroup)) as failed:
        perform(play, steps=STEPS)
    assert play.damaged
    found = leaves(failed.value)
    assert found
    for error in found:
        assert isinstance(error, ShoalError), f"a traceback, not a sentence: {error!r}"
        assert row.ends[harm] in str(error)


def test_each_file_of_the_table_has_a_test_and_each_test_a_row() -> None:
    """What docs/operating.md promises of a file is what is tried."""
    here = Path(__file__).parent
    text = (here.parent.parent / "docs" / "operating.md").read_text(encoding="utf-8")
    table = text.split("| file under DIR |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    told = [name for line in table for name in re.findall(r"`([^`]+)`", line.split("|")[1])]
    assert len(told) == len(set(told)) > 20
    assert set(told) == {row.told for row in ROWS} | ELSEWHERE.keys()
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (here / file).read_text(encoding="utf-8")
    for row in ROWS:
        says = next(line for line in table if f"`{row.told}`" in line)
        assert not row.ends or "ends (exit 1)" in says, row.told
