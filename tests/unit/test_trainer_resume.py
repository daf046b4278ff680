"""A trainer's process is killed with -9 at any time: it comes to the weights of one that was
not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file

from roles.engines.torch.learner import TorchLearner
from tests.unit.trainer_life import CHECKPOINT_EVERY, CONFIG, delivery, lesson

LIVES = int(os.environ.get("SHOAL_TRAINER_KILLS", "3"))
"""Each is ended by a kill. Three take 15 CPU s, with the processes of their engines; 20 have
been done, and are of use after a change to what a trainer keeps."""
YOUNG = 4
"""One life in so many is killed before or while it takes up what the one before has left."""
START = 6.0
"""Seconds in which a young life is killed: starting takes two on a quiet machine."""


def live_until(folder: Path, version: int, delay: float) -> None:
    """Start the trainer, and kill it some time after it has published ``version``, or, if that
    is 0, after its start."""
    command = [sys.executable, "-m", "tests.unit.trainer_life", str(folder), str(10**6)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while version and int(process.stdout.readline()) < version:
            pass
        with suppress(subprocess.TimeoutExpired):
            process.wait(delay)  # where in a step it dies is the machine's affair
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL


def test_killed_with_nine_it_comes_to_the_same_weights(tmp_path: Path) -> None:
    rng = Random(13)
    version = 0
    logged: dict[int, list[list[object]]] = {}
    kills = []
    for life in range(1, LIVES + 1):
        if life % YOUNG == 0:
            live_until(tmp_path, 0, rng.uniform(0, START))
        else:
            live_until(tmp_path, version + rng.randint(3, 7), rng.uniform(0, 0.06))
        rows = json.loads((tmp_path / "intake/used.json").read_bytes().partition(b"\n")[2])
        for row in rows:
            same = logged.setdefault(row[2], [])
            if row not in same:
                same.append(row)
        version = int((tmp_path / "published.jsonl").read_text().split()[-1])
        kills.append((version, max(logged)))
    # What every life said of a step is the same: five groups, no more.
    assert {len(rows) for rows in logged.values()} == {5}
    places = {(row[0], row[1]) for rows in logged.values() for row in rows}
    assert len(places) == 5 * len(logged)
    names = {delivery(index).verdict.commitment.content.hex(): index for index in range(400)}
    torch.set_num_threads(1)
    undisturbed = TorchLearner(CONFIG)
    undisturbed.start()
    compared = 0
    for step in range(1, version + 1):
        undisturbed.step([lesson(names[str(row[0])], int(str(row[1]))) for row in logged[step]])
        path = tmp_path / f"trainer/weights/{step:08d}.safetensors"
        if path.exists():
            found = load_file(path)
            for name, weight in undisturbed.model.named_parameters():
                assert torch.equal(found[name], weight)
            compared += 1
    assert compared >= CHECKPOINT_EVERY
    kept = sum(1 for _ in (tmp_path / "trainer/weights").iterdir())
    text = f"{len(kills)} kills at (published, logged): {kills}; {compared} of {kept} compared"
    sys.stdout.write(f"{text}\n")
