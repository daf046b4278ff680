"""Whole nodes on levels 1 to 3: one scenario, simulated and as real processes."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from p2p.errors import ConfigError
from p2p.node.process import locked_folder
from sim.cli import EXIT_UNAVAILABLE, main
from sim.errors import LabError
from sim.faults.plan import Fault
from sim.net.link import LinkSpec
from sim.run.result import Result
from sim.run.runner import run_scenario
from sim.run.scenario import DrawnFaults, Scenario, load_scenario
from sim.studies.lab import machines
from sim.studies.lab.namespaces import CAPABILITIES, _missing_capabilities, reason_to_skip
from sim.studies.lab.real import MAX_NODES, check
from tests.support.scenarios import FEW_NODES

KILLED = replace(
    FEW_NODES,
    parameters={**FEW_NODES.parameters, "versions": 2, "interval": 4.0},
    faults=(
        Fault(at=6.5, kind="kill", who=("n2",), seconds=1.0),
        Fault(at=6.5, kind="pause", who=("n3",), seconds=0.5),
        Fault(at=8.5, kind="drip", who=("n3",), seconds=1.0, value=5.0),
    ),
)


def play(scenario: Scenario, level: int, seed: int = 1) -> Result:
    return run_scenario(replace(scenario, level=level), seed)


@pytest.mark.parametrize("level", [1, 2])
def test_a_policy_is_everywhere_soon_after_the_bound_allows(level: int) -> None:
    metrics = play(FEW_NODES, level).metrics
    assert metrics["hold_newest"] == 1
    assert 1 < metrics["seconds_100"] / metrics["bound_seconds"] < 1.4
    assert metrics["origin_policies_sent"] == pytest.approx(1, abs=0.1)
    assert metrics["from_peers_share"] == pytest.approx(2 / 3, abs=0.1)


def test_a_killed_node_gets_what_it_missed_and_a_killed_origin_goes_on() -> None:
    faults = (*KILLED.faults, Fault(at=7.5, kind="kill", who=("origin",), seconds=1.0))
    metrics = play(replace(KILLED, faults=faults), 1).metrics
    assert metrics["published"] == 2
    assert metrics["hold_newest"] == metrics["arrived_share"] == 1


# What a scenario may ask of which level


@pytest.mark.parametrize(
    ("name", "level", "complaint"),
    [
        ("churn", 3, "runs at level 1, not at level 3"),
        ("churn", 2, "runs at level 1, not at level 2"),
        ("intellect2", 1, "runs at level 0, not at level 1"),
        ("lab_broadcast", 4, "level 1 and level 2 and level 3, not at level 4"),
    ],
)
def test_a_workload_says_on_which_levels_it_runs(name: str, level: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        run_scenario(replace(load_scenario(name), level=level), 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"nodes": MAX_NODES + 1}, "nodes"),
        ({"latency": 0.05}, "latency"),
        ({"regions": True}, "latency"),
        ({"link": LinkSpec(loss=0.1)}, "loss"),
        ({"draw": DrawnFaults()}, "drawn"),
        ({"faults": (Fault(at=1, kind="clog", who=("n1",)),)}, "'clog', only kill"),
        ({"faults": (Fault(at=1, kind="kill", who=("25%",)),)}, "shares"),
    ],
)
def test_what_level_3_lacks_is_named(change: dict, complaint: str) -> None:
    check(FEW_NODES)
    with pytest.raises(ConfigError, match=complaint):
        check(replace(FEW_NODES, **change))


def test_without_namespaces_one_sentence_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sim.studies.lab.namespaces.reason_to_skip", lambda: "needs root, or CAP_NET_ADMIN"
    )
    assert main(["run", "lab_broadcast", "--level", "3"]) == EXIT_UNAVAILABLE
    assert "needs root" in capsys.readouterr().err


@pytest.mark.parametrize("lacking", [(), ("CAP_NET_ADMIN",), tuple(CAPABILITIES)])
def test_missing_capabilities_are_named(lacking: tuple[str, ...]) -> None:
    effective = sum(1 << bit for name, bit in CAPABILITIES.items() if name not in lacking)
    assert _missing_capabilities(f"Name:\tx\nCapEff:\t{effective:016x}\n") == list(lacking)
    assert _missing_capabilities("") == list(CAPABILITIES)


# Level 3


@pytest.fixture(scope="module")
def shaped_lines() -> None:
    reason = reason_to_skip()
    if reason is not None:
        pytest.skip(f"level L3, real processes on shaped lines: {reason}")


@pytest.mark.deep
@pytest.mark.usefixtures("shaped_lines")
def test_real_nodes_answer_the_same_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody beats the bound, a killed process comes back, and nothing is left behind."""
    monkeypatch.setattr("sim.studies.lab.machines.MEMORY", tmp_path)
    interfaces = sorted(os.listdir("/sys/class/net"))
    real = play(KILLED, 3)
    assert real.metrics.keys() == play(KILLED, 1).metrics.keys()
    assert real.metrics["hold_newest"] == real.metrics["arrived_share"] == 1
    assert real.metrics["published"] == 2
    assert real.metrics["seconds_50"] > 0.93 * real.metrics["bound_seconds"]
    assert real.metrics["origin_line_policies"] > 0.9
    assert (real.trace_hash, real.level, len(real.faults)) == ("", 3, 3)
    assert (os.listdir(tmp_path), sorted(os.listdir("/sys/class/net"))) == ([], interfaces)


async def one_machine(emulation: machines.Emulation) -> machines.LabMachine:
    link = LinkSpec(up=10, down=10)
    return await emulation.add("home", link, lambda folder: (folder / "furniture").touch())


def said_by(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.mark.usefixtures("shaped_lines")
async def test_a_program_that_ends_unasked_is_reported_with_its_last_words() -> None:
    async def live() -> None:
        async with machines.open_emulation(machines.EmulationConfig()) as emulation:
            machine = await one_machine(emulation)
            await machine.start(
                said_by("import sys; sys.exit('no more bread')"), lambda report: None
            )
            with trio.fail_after(30):
                await trio.sleep_forever()

    with pytest.raises(ExceptionGroup) as failure:
        await live()
    assert failure.group_contains(LabError, match=r"home ended with 1, .*no more bread")


@pytest.mark.usefixtures("shaped_lines")
async def test_a_house_is_wiped_and_its_program_started_again() -> None:
    reports, send = trio.open_memory_channel[dict](10)
    program = "import json, time; print(json.dumps({'pid': 1}), flush=True); time.sleep(1000)"
    with trio.fail_after(60):
        async with machines.open_emulation(machines.EmulationConfig()) as emulation:
            machine = await one_machine(emulation)
            await machine.start(said_by(program), reports.send_nowait)
            await send.receive()
            (machine.folder / "junk").write_text("junk")
            await machine.kill()
            assert not machine.alive
            machine.wipe()
            assert os.listdir(machine.folder) == ["furniture"]
            await machine.restart()
            await send.receive()
            assert machine.alive
            folder = emulation.folder
    assert not folder.exists()


OWNER = """
import json, os, sys, trio
from sim.studies.lab.machines import EmulationConfig, open_emulation
from tests.simulation.test_nodes import one_machine, said_by

PROGRAM = (
    "import json, os, sys; print(json.dumps({'pid': os.getpid()}), flush=True); "
    "sys.stdin.read()"
)

async def main():
    async with open_emulation(EmulationConfig()) as emulation:
        def hear(report):
            print(json.dumps({**report, "folder": str(emulation.folder)}), flush=True)
        await (await one_machine(emulation)).start(said_by(PROGRAM), hear)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.usefixtures("shaped_lines")
def test_nothing_outlives_a_street_whose_owner_is_killed() -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        told = json.loads(owner.stdout.readline())
        program = os.pidfd_open(told["pid"])
        owner.kill()
    assert select.select([program], [], [], 10)[0]  # a process that has ended is readable
    os.close(program)
    assert Path(told["folder"]).exists()
    assert Path(told["folder"]) in machines.sweep_leftovers()
    assert not Path(told["folder"]).exists()


def test_leftovers_are_swept_and_streets_in_use_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.studies.lab.machines.MEMORY", tmp_path)
    used, dead = (
        tmp_path / f"{machines.FOLDER_PREFIX}used",
        tmp_path / f"{machines.FOLDER_PREFIX}dead",
    )
    (dead / "n1").mkdir(parents=True)
    (dead / "n1" / "key").write_text("x")
    with locked_folder(used):
        assert machines.sweep_leftovers() == [dead]
    assert sorted(tmp_path.iterdir()) == [used]
