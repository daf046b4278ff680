"""A real swarm of processes, which learns and survives kill -9."""

from __future__ import annotations

import os
import re
import select
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import trio

from roles.demo.command import prepare
from roles.demo.shows import SORTING, RewardDemo
from roles.own.layout import RunFolder
from roles.own.nodes import LocalNodes, NodeProcess
from roles.own.status import Status
from roles.rl.learner import WarmUp
from tests.support.processes import descendants, started
from tests.sweeps import DEEP

KILLS = (("inference-1", 2), ("validator", 5), ("trainer", 8)) if DEEP else (("trainer", 2),)
"""Which node is killed under which policy."""
STEPS = KILLS[-1][1] + (6 if DEEP else 2)


class SmallDemo(RewardDemo):
    """One honest worker less, which is an engine less."""

    cast: ClassVar[dict[str, str]] = {
        name: role for name, role in SORTING.cast.items() if DEEP or name != "inference-2"
    }


SMALL = SmallDemo(
    **{
        **vars(SORTING),
        "tables": {**SORTING.tables, "sampling": {"group_size": 8, "submission": 4}},
        "learner": {
            "groups": 8,
            "minibatches": 2,
            "evaluate_every": 0,
            "warm_up": WarmUp(steps=80, rate=4e-3, ramp=20),
        },
    }
)
PATIENCE = 400
"""Seconds for the whole play on a busy machine; alone on two cores it takes about 30."""


@asynccontextmanager
async def staged(folder: Path, steps: int = STEPS) -> AsyncIterator[LocalNodes]:
    """The demo's cast with a small recipe, ended whatever happens."""
    show = SMALL.with_steps(steps)
    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            run = prepare(show, 1, RunFolder(folder))
            stage = LocalNodes(RunFolder(folder), run, show.cast, nursery)
            try:
                await stage.start()
                yield stage
            finally:
                with trio.CancelScope(shield=True):
                    await stage.stop()


def ledger(folder: Path, name: str) -> bytes:
    return b"".join(
        path.read_bytes() for path in sorted((folder / name / "ledger").glob("*.seg"))
    )


def policies(folder: Path, name: str) -> dict[str, bytes]:
    """What lies in a node's store, by path below it."""
    store = folder / name / "store"
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in store.rglob("*")
        if path.is_file()
    }


def holds(version: int):
    def check(status: Status) -> bool:
        return bool(status["shardcast"]["newest"] >= version)

    return check


async def kill(stage: LocalNodes, name: str) -> int:
    """kill -9; returns the newest policy that the node said it held."""
    child = stage.children[name]
    assert child.status is not None
    newest = int(child.status["shardcast"]["newest"])
    child.kill()
    assert child.process is not None
    await child.process.wait()
    child.status = None
    return newest


async def test_killed_nodes_lose_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        versions: list[int] = []
        for victim, at in KILLS:
            await stage.children["trainer"].wait_status(holds(at))
            before = await kill(stage, victim)
            said = ledger(tmp_path, victim)
            stored = policies(tmp_path, victim)
            assert stored
            assert said or victim == "inference-1", "validators and trainers sign what they do"
            await stage.start_child(victim)
            first = await stage.children[victim].wait_status(lambda _: True)
            assert first["shardcast"]["newest"] >= before, "a policy version went back"
            assert ledger(tmp_path, victim).startswith(said)
            kept = policies(tmp_path, victim)
            assert all(kept[path] == data for path, data in stored.items() if path in kept)
            versions.append(before)
        status = await stage.wait_done(lambda: None)
        figures = status.figures()
    assert versions == sorted(versions)
    assert status.done
    assert figures["policies"] == STEPS + 1
    assert figures["cheater_accepted"] == 0
    assert figures["honest_rejected"] == 0
    assert not any((tmp_path / name / "key").stat().st_mode & 0o077 for name in SMALL.cast)


@pytest.mark.deep
async def test_another_shell_joins_with_one_address_and_works(tmp_path: Path) -> None:
    # Nobody works under the last policy: the run has to outlast the newcomer's start on a busy
    # machine.
    async with staged(tmp_path, steps=500) as stage:
        await stage.children["trainer"].wait_status(holds(1))
        newcomer = NodeProcess("newcomer", tmp_path)
        newcomer.folder.mkdir()
        command = re.sub(r"~/shoal-\w+", str(newcomer.folder), stage.join_command).split()[2:]
        process = await newcomer.start(
            [*command, "--json", "--status", "0.5", "--die-with-parent"]
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(newcomer.listen, lambda: None)
            await newcomer.wait_status(
                lambda status: status["roles"]["inference"]["accepted"] > 0
            )
            process.terminate()
            with trio.fail_after(60):
                assert await process.wait() == 0


@pytest.mark.deep
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_however_the_demo_ends_nothing_of_it_is_left(
    tmp_path: Path, how: signal.Signals
) -> None:
    with started("-m", "roles.demo", "--data", str(tmp_path / "swarm")) as demo:
        assert demo.stdout is not None
        assert "see the swarm: http://127.0.0.1:" in demo.stdout.readline()
        assert "join from another shell" in demo.stdout.readline()
        family = [os.pidfd_open(pid) for pid in descendants(demo.pid)]
        assert len(family) >= len(SORTING.cast)
        for _ in range(20):  # whoever presses Ctrl-C does so again
            demo.send_signal(how)
        output, _ = demo.communicate(timeout=30)
        if how is signal.SIGINT:
            assert demo.returncode == 130, output
            assert "interrupted" in output
            assert "Traceback" not in output
        else:
            assert demo.returncode == -signal.SIGKILL
        for process in family:  # a pidfd becomes readable when its process has ended
            assert select.select([process], [], [], 30)[0], "a process of the demo outlived it"
