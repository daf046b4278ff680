"""A trainer's process is killed with -9 at any time: it comes to the weights of one that was
not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from select import select
from time import perf_counter

import torch
from safetensors.torch import load_file

from roles.engines.torch.learner import TorchLearner
from tests.unit.trainer_life import CHECKPOINT_EVERY, CONFIG, PUBLISHED, TOLD, lessons, place

LIVES = int(os.environ.get("SHOAL_TRAINER_KILLS", "3"))
"""Each is ended by a kill. Three take 15 CPU s, with the processes of their engines; 20 have
been done, and are of use after a change to what a trainer keeps."""
YOUNG = 4
"""One life in so many is killed while it starts, and takes up what the one before has left."""


def live_until(
    folder: Path, version: int, later: float, patience: float | None = None
) -> float:
    """Start the trainer, and kill it ``later``, in steps, than it has published ``version``, or
    when it has published nothing for ``patience`` seconds. Returns how long it took to
    publish."""
    command = [sys.executable, "-m", "tests.unit.trainer_life", str(folder), str(10**6)]
    began = perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found, _, _ = select([process.stdout], [], [], patience)
        start, steps = perf_counter() - began, 0
        while found and int(process.stdout.readline()) < version:
            steps += 1
        step = (perf_counter() - began - start) / max(1, steps)
        with suppress(subprocess.TimeoutExpired):
            process.wait(later * step)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    return start


def rows_of(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Place, group and step in the order of learning, on which the weights depend: first what
    was told, which is whole but for the last step; the log forgets places."""
    for line in (folder / TOLD).read_text().splitlines():
        with suppress(json.JSONDecodeError):
            yield from json.loads(line) if line else ()
    yield from json.loads((folder / "intake/used.json").read_bytes().partition(b"\n")[2])


def test_killed_with_nine_it_comes_to_the_same_weights(tmp_path: Path) -> None:
    rng = Random(13)
    version, start = 0, 0.0
    logged: dict[int, dict[tuple[str, int], None]] = {}
    kills = []
    for life in range(1, LIVES + 1):
        if life % YOUNG == 0:
            live_until(tmp_path, 0, 0.0, patience=rng.uniform(0.3, 1.0) * start)
        else:
            last = version + rng.randint(3, 7)
            start = live_until(tmp_path, last, rng.uniform(0, 2))
        for key, number, step in rows_of(tmp_path):
            logged.setdefault(step, {})[key, number] = None
        version = int((tmp_path / PUBLISHED).read_text().split()[-1])
        kills.append((version, max(logged)))
    # What every life said of a step is the same: five groups, no more.
    assert {len(rows) for rows in logged.values()} == {5}
    places = {place for rows in logged.values() for place in rows}
    assert len(places) == 5 * len(logged)
    taught = {place(index).key.hex(): lessons(index) for index in range(400)}
    torch.set_num_threads(1)
    undisturbed = TorchLearner(CONFIG)
    undisturbed.start()
    compared = 0
    for step in range(1, version + 1):
        undisturbed.step([taught[key][number].group for key, number in logged[step]])
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
