"""A trainer in another process: whoever is killed, nothing is learnt or published twice."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from safetensors.numpy import load_file, save_file

from p2p.machine import RealWorld
from roles.engines.base import TrainingGroup
from roles.engines.client import open_engine
from roles.engines.external import ExternalLearner
from roles.shared.exchange import decode_groups
from roles.trl.run import SwarmRefused, SwarmRun
from tests.unit.external_trainer import Weights, learn, name
from tests.unit.trainer_life import CONFIG, KEY, PUBLISHED, TOLD, lessons, place

STEPS = 9
NODE_DIES = ("planned:2", "given:3", "come:4", "written:5", "saved:6", "never")
TRAINER_DIES = ("learnt:2", "written:5", "reported:7", "never")


def start(module: str, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", f"tests.unit.{module}", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (folder / "trainer/weights").glob("*.safetensors")
    }


def told(folder: Path) -> dict[int, list[tuple[str, int]]]:
    """What the node's log said of each step, in order; every life must say the same."""
    steps: dict[int, list[tuple[str, int]]] = {}
    for line in filter(None, (folder / TOLD).read_text().splitlines()):
        rows = json.loads(line)
        places = [(key, number) for key, number, _ in rows]
        assert steps.setdefault(rows[0][2], places) == places
    return steps


def name_of(group: TrainingGroup) -> str:
    texts = [np.array(group.prompt + one.tokens, "<u4") for one in group.completions]
    return hashlib.sha256(b"".join(text.tobytes() for text in texts)).hexdigest()


@pytest.mark.deep
def test_every_group_is_learnt_once_and_every_version_written_once(tmp_path: Path) -> None:
    exchange, out = tmp_path / "trainer/external", tmp_path / "out"
    out.mkdir()
    node_dies, trainer_dies = iter(NODE_DIES), iter(TRAINER_DIES)
    node = start("trainer_life", tmp_path, STEPS, next(node_dies))
    trainer = start("external_trainer", exchange, out, next(trainer_dies))
    seen: dict[str, str] = {}
    deaths = Counter[str]()
    try:
        while node.poll() != 0:
            for who, process in (("node", node), ("trainer", trainer)):
                if process.poll() == -signal.SIGKILL:
                    deaths[who] += 1
                    found = digests(tmp_path)
                    assert {path: found.get(path, was) for path, was in seen.items()} == seen
                    seen |= found
                    if who == "node":
                        node = start("trainer_life", tmp_path, STEPS, next(node_dies))
                    else:
                        trainer = start("external_trainer", exchange, out, next(trainer_dies))
            assert node.poll() in (None, 0, -signal.SIGKILL)
            os.sched_yield()
    finally:
        for process in (node, trainer):
            process.kill()
            process.wait()
    assert deaths == {"node": len(NODE_DIES) - 1, "trainer": len(TRAINER_DIES) - 1}
    published = (tmp_path / PUBLISHED).read_text().split()
    assert published == [str(version) for version in range(STEPS + 1)]
    steps = told(tmp_path)
    places = [place for rows in steps.values() for place in rows]
    assert sorted(steps) == list(range(1, STEPS + 1))
    assert len(set(places)) == len(places)
    # What the trainer was given is what was logged, and each version on disk is what a trainer
    # comes to that was not killed.
    taught = {place(index).key.hex(): lessons(index) for index in range(60)}
    weights: Weights = load_file(exchange / "model-000000/model.safetensors")
    compared = 0
    for step, rows in sorted(steps.items()):
        groups = decode_groups((out / f"{step}.msgpack").read_bytes())
        assert list(map(name, groups)) == [name_of(taught[key][at].group) for key, at in rows]
        learn(weights, groups)
        path = tmp_path / f"trainer/weights/{step:08d}.safetensors"
        if path.exists():
            assert all(np.array_equal(load_file(path)[key], weights[key]) for key in weights)
            compared += 1
    assert compared >= 7


BAD: list[tuple[Callable[[Weights], Any], str]] = [
    (lambda old: dict(zip(("other", *list(old)[1:]), old.values(), strict=True)),
     "2 names differ, the first is "),
    (lambda old: {name: weight[:1] for name, weight in old.items()}, "of shape (1"),
    (lambda old: {name: weight.astype("int8") for name, weight in old.items()},
     "has an unknown dtype"),
    (lambda old: {name: weight * np.float32("nan") for name, weight in old.items()},
     "holds NaN or infinity"),
]  # fmt: skip


async def refusal(run: SwarmRun) -> str:
    while True:
        try:
            run.greet()
        except SwarmRefused as refused:
            return str(refused)
        await trio.lowlevel.checkpoint()


async def there(path: Path) -> None:
    while not path.exists():  # noqa: ASYNC240 - a tiny folder
        await trio.lowlevel.checkpoint()


async def test_a_trainer_that_errs_is_refused_with_a_sentence_and_another_goes_on(
    tmp_path: Path,
) -> None:
    world, folder = RealWorld(KEY, tmp_path), tmp_path / "trainer/external"
    this: Any = SimpleNamespace(id=bytes(32), name="this")
    reports = []
    async with (
        open_engine(world, CONFIG, name="trainer") as engine,
        trio.open_nursery() as nursery,
    ):
        learner = ExternalLearner(engine, world, CONFIG, this)

        async def work() -> None:
            await learner.open("trainer/checkpoint")
            await learner.save("trainer/checkpoint", "trainer/weights/0.safetensors")
            for step in (1, 2):
                groups = [one.group for one in lessons(step)]
                reports.append(await learner.step(groups))
                await learner.save("", f"trainer/weights/{step}.safetensors")

        nursery.start_soon(work)
        await there(folder / "task.json")
        assert "start it on" in learner.warning
        life = json.loads((folder / "task.json").read_text())["life"]
        for odd in ({"step": math.inf}, {"step": 10**400, "who": "a" * 5000}, {"who": "../a"}):
            ready = {"run": bytes(32).hex(), "who": "a", "step": 0, **odd}
            (folder / f"ready-{life}.json").write_text(json.dumps(ready))
            await learner._look()
            assert "start it on" in learner.warning
        other = SwarmRun(folder)
        other.task["run"] = "ff"
        other.begin(0)
        assert "of another run than 'this'" in await refusal(other)
        early = SwarmRun(folder)
        early.begin(5)
        assert "has learnt step 5, and was given none after 0" in await refusal(early)
        assert learner.warning == await refusal(early)
        weights: Weights = load_file(Path(early.model) / "model.safetensors")
        for spoil, said in BAD:
            run = SwarmRun(folder)
            run.begin(0)
            await there(folder / "groups-000001.msgpack")
            run.publish(1, partial(save_file, spoil(weights)))
            run.report(1, {"loss": 0.5})
            assert said in await refusal(run)
        run = SwarmRun(folder)
        run.begin(0)
        run.publish(7, partial(save_file, weights))
        assert "handed in step 7, and was given none after 1" in await refusal(run)
        run = SwarmRun(folder)
        run.begin(0)
        run.publish(1, partial(save_file, weights))
        run.report(1, {"loss": 0.5, "odd": 3.0, "k3": 10**400, "large": -(10**400)})
        await there(folder / "groups-000002.msgpack")
        assert (reports[0].step, reports[0].loss, reports[0].metrics) == (1, 0.5, {"odd": 3.0})
        (folder / "weight_v000001").mkdir()
        assert "version 1 a second time" in await refusal(run)
        run = SwarmRun(folder)
        run.begin(1)
        run.publish(2, partial(save_file, weights))
        run.report(2, {})
    assert [report.step for report in reports] == [1, 2]


@pytest.mark.deep
@pytest.mark.parametrize("how", [(), ("--lora",)])
def test_trl_learns_what_it_is_given_and_its_weights_arrive_merged(
    tmp_path: Path, how: tuple[str, ...]
) -> None:
    for package in ("trl", "peft"):
        pytest.importorskip(package, reason="TRL learns with pip install -e '.[trl]'")
    exchange = tmp_path / "trainer/external"
    node = start("trainer_life", tmp_path, 3, "never")
    script = [sys.executable, "examples/trl/train.py", exchange, tmp_path / "trl", *how]
    trainer = subprocess.Popen(script)
    try:
        while node.poll() is None:
            assert trainer.poll() is None
            os.sched_yield()
    finally:
        for process in (node, trainer):
            process.kill()
            process.wait()
    assert (tmp_path / PUBLISHED).read_text().split() == ["0", "1", "2", "3"]
    versions = [
        load_file(tmp_path / f"trainer/weights/{version:08d}.safetensors")
        for version in range(4)
    ]
    for before, after in pairwise(versions):
        moved = {key for key in before if not np.array_equal(before[key], after[key])}
        assert before.keys() == after.keys()
        assert any("q_proj" in key for key in moved)
        assert ("model.norm.weight" in moved) != bool(how)
