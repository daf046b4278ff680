"""A trainer of somebody's own, without TRL: it learns by arithmetic, and remembers from what.

``python -m tests.unit.external_trainer EXCHANGE OUT POINT:STEP`` kills itself at a point of a
step: learnt, written or reported.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from roles.shared.exchange import Row, encode_groups
from roles.trl.run import SwarmRun, write

Weights = dict[str, NDArray[np.float32]]
EVERY: Final = 2
"""Steps between checkpoints."""


def learn(weights: Weights, groups: Sequence[Sequence[Row]]) -> None:
    """Move every weight by what the groups say, in their order."""
    for group in groups:
        for row in group:
            pull = float(row.logprobs.sum()) + float(row.ids.sum()) * row.advantage
            for weight in weights.values():
                weight += np.float32(1e-3 * np.tanh(pull)) * np.float32(row.reward + 0.5)


def name(group: Sequence[Row]) -> str:
    """Return the name of a group by its content."""
    return hashlib.sha256(b"".join(row.ids.tobytes() for row in group)).hexdigest()


def main(exchange: Path, out: Path, point: str) -> None:
    run = SwarmRun(exchange)
    newest = run.newest_checkpoint()
    history: list[list[str]] = []
    path = Path(newest or Path(run.model) / "model.safetensors")
    weights = load_file(path)
    if newest:
        with safe_open(path, "numpy") as file:
            history = json.loads(file.metadata()["history"])

    def save(target: Path) -> None:
        save_file(weights, target, {"history": json.dumps(history)})

    run.begin(run.first + len(history))
    while run.step < run.steps:
        step = run.step + 1
        groups = run.wait_groups(step)
        copy, content = out / f"{step}.msgpack", encode_groups(step, groups)
        assert not copy.exists() or copy.read_bytes() == content
        write(copy, content)
        learn(weights, groups)
        history.append([name(group) for group in groups])
        for here, do in (
            ("learnt", lambda: None),
            ("written", lambda: run.publish(run.step + 1, save)),
            ("reported", lambda: run.report(run.step + 1, {"loss": 0.5, "k3": 0.01})),
        ):
            do()
            if point == f"{here}:{step}":
                os.kill(os.getpid(), signal.SIGKILL)
        run.step = step
        if step % EVERY == 0:
            save(out / f"{step}.partial")
            (out / f"{step}.partial").replace(out / f"{step}.safetensors")
            run.note_checkpoint(step, out / f"{step}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
