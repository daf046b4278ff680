"""A run whose learner is TRL, in a process of its own: two volunteers and a cheat on loopback.

``python -m bench.own_trainer DIR --python TRL_PYTHON`` plays it, or goes on with it; --kill
ends TRL and the node by SIGKILL, three times each, at steps of the run. TRL_PYTHON is a Python
with ``shoal[trl]``. Writes DIR/figures.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import subprocess
from dataclasses import fields
from pathlib import Path
from time import monotonic  # noqa: TID251 - a tool
from typing import Any, ClassVar

import trio

from roles.contract import Run
from roles.demo.command import prepare
from roles.demo.shows import SORTING, RewardDemo, arithmetic
from roles.own.layout import TRAINER, RunFolder
from roles.own.nodes import LocalNodes

SCRIPT = Path(__file__).parent.parent / "examples/trl/train.py"


class OwnTrainer(RewardDemo):
    """The cast of a small run."""

    cast: ClassVar[dict[str, str]] = {
        "relay-1": "none",
        TRAINER: "trainer",
        "inference-1": "inference",
        "inference-2": "inference",
        "cheat-1": "roles.demo.cheats:Cheat",
    }

    def draft(self, seed: int, peers: Any) -> dict[str, Any]:
        return super().draft(seed, {**peers, "validator": ""}) | {"validators": []}


def show(options: argparse.Namespace) -> OwnTrainer:
    shipped = arithmetic(options.model) if options.model else SORTING
    given = {one.name: getattr(shipped, one.name) for one in fields(shipped)}
    learner = {"kind": "external", "groups": options.groups}
    learner |= {"evaluate_every": options.every}
    learner |= {"evaluate_tasks": options.tasks}
    learner |= {"rate": options.rate} if options.rate else {}
    return OwnTrainer(**{**given, "steps": options.steps, "learner": learner})


class Teacher:
    """The TRL process, started again whenever it was killed."""

    def __init__(self, options: argparse.Namespace, exchange: Path) -> None:
        self._options, self._exchange = options, exchange
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        folder = self._options.folder
        command = [str(self._options.python), str(SCRIPT), str(self._exchange), f"{folder}/trl"]
        with (folder / "trl.log").open("ab") as log:
            command += ["--lora"] if self._options.lora else []
            # Of several processes on one machine each computes with one thread.
            where = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=where)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


async def play(
    options: argparse.Namespace, demo: OwnTrainer, folder: RunFolder, run: Run
) -> None:
    exchange = folder.node(TRAINER) / "trainer/external"
    teacher, began, killed = Teacher(options, exchange), monotonic(), list[str]()
    kills = ["node:2", "trl:3", "node:4", "trl:5", "node:6", "trl:7"] if options.kill else []
    async with trio.open_nursery() as nursery:
        nodes = LocalNodes(folder, run, demo.cast, nursery)
        try:
            await nodes.start()
            teacher.start()
            while not nodes.status.trainer.get("done"):
                await trio.sleep(0.2)  # noqa: TID251
                step = (nodes.status.trainer or {}).get("step") or 0
                if kills and step >= int(kills[0].partition(":")[2]):
                    who = kills.pop(0)
                    await trio.sleep(len(killed) * 0.7)  # noqa: TID251 - at other points of a step
                    if who.startswith("trl"):
                        teacher.kill()
                        teacher.start()
                    else:
                        nodes.children[TRAINER].kill()
                        await nodes.children[TRAINER].process.wait()  # type: ignore[union-attr]
                        await nodes.start_child(TRAINER)
                    killed.append(f"{who} at {step}")
                    print(killed[-1], flush=True)
            figures = demo.figures(nodes)
        finally:
            with trio.CancelScope(shield=True):
                teacher.kill()
                await nodes.stop()
        nursery.cancel_scope.cancel()
    progress = (folder.node(TRAINER) / "trainer/progress.json").read_bytes().partition(b"\n")[2]
    curve = json.loads(progress)["curve"]
    se = math.sqrt(0.25 * 2 / options.tasks)
    names = ("cheater_submitted", "cheater_accepted", "honest_rejected", "rollouts_accepted")
    result = {
        "minutes": round((monotonic() - began) / 60, 1),
        "killed": killed,
        "curve": curve,
        "gain of the last five over the first": [one[1] - curve[0][1] for one in curve[-5:]],
        "twice the standard error of a difference": round(2 * se, 3),
        **{name: figures.get(name) for name in names},
    }
    (options.folder / "figures.json").write_text(json.dumps(result, indent=2))
    print(json.dumps(result, indent=2))


def main() -> None:
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("folder", type=Path)
    parse.add_argument("--python", type=Path, required=True, help="a Python with shoal[trl]")
    parse.add_argument("--model", default="", help="smollm2 (default: the network that sorts)")
    parse.add_argument("--steps", type=int, default=12)
    parse.add_argument("--groups", type=int, default=8)
    parse.add_argument("--tasks", type=int, default=128)
    parse.add_argument("--every", type=int, default=1, help="steps between evaluations")
    parse.add_argument("--rate", type=float)
    parse.add_argument("--kill", action="store_true")
    parse.add_argument("--lora", action="store_true")
    options = parse.parse_args()
    logging.basicConfig(level=logging.WARNING)
    options.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    demo, folder = show(options), RunFolder(options.folder)
    trio.run(play, options, demo, folder, prepare(demo, 0, folder))


if __name__ == "__main__":
    main()
