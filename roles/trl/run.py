"""The trainer's side of the folder, for any trainer: no TRL, no torch.

A trainer asks `SwarmRun` what to learn from, step by step, and hands it the weights::

    run = SwarmRun(folder)
    state = load(run.newest_checkpoint() or run.model)
    run.begin(state.step)
    while run.step < run.steps:
        groups = run.wait_groups(run.step + 1)
        ...
        run.publish(step, save)  # save(path) writes a safetensors file
        run.report(step, {"loss": loss})
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from roles.shared import exchange
from roles.shared.exchange import CHECKPOINT, GROUPS, REPORT, TAKEN, TASK, WEIGHTS, Row, name_of

POLL: Final = 0.05
"""Seconds between two looks at the folder."""


class SwarmRefused(RuntimeError):
    """The node cannot go on with this trainer. The message says why, and what to do."""


class SwarmRun:
    """A run for which this process is the learner."""

    def __init__(self, folder: str | Path, *, patience: float = math.inf) -> None:
        """Wait until the node has written its task.

        Args:
            folder: ``trainer/external`` of the trainer node's data.
            patience: Seconds to wait.

        Raises:
            SwarmRefused: Nobody says it in that time, or this program is too old for it.
        """
        self.folder = Path(folder).absolute()
        self._who = secrets.token_hex(8)
        self._greeted = ""
        ends = time.monotonic() + patience  # noqa: TID251 - no node's process
        while not (self.folder / TASK).exists():
            if time.monotonic() > ends:  # noqa: TID251
                raise SwarmRefused(
                    f"{self.folder} has no {TASK}: start a trainer node whose learner.toml says"
                    ' kind = "external", and give the folder trainer/external of its data'
                )
            time.sleep(POLL)  # noqa: TID251
        self.task = self._read(TASK)
        if self.task.get("format") != exchange.FORMAT:
            raise SwarmRefused(f"{self.folder / TASK} has another format: update shoal here")
        self.model: str = self.task["model"]
        """The folder of the model to begin with."""
        self.first: int = self.task["first"]
        """The version that it is; own steps are counted from there."""
        self.steps: int = self.task["steps"]
        """Steps of the run."""
        self.rows: int = self.task["groups"] * self.task["group_size"]
        """Answers that a step learns from."""
        self.step = self.first
        """The step that is learnt."""
        self.written = self.first
        """The newest version that was written."""

    def newest_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint that was noted and is still there."""
        names = os.listdir(self.folder)
        for step in reversed(exchange.steps_of(CHECKPOINT, names)):
            path: str = self._read(name_of(CHECKPOINT, step))["path"]
            if step >= self.first and Path(path).exists():
                return path
        return None

    def begin(self, step: int) -> None:
        """Tell the node that this trainer has the weights of ``step`` and learns the next step
        now."""
        self.step = self.written = step
        self.greet()

    def greet(self) -> None:
        """Answer a node that was started, or started again.

        Raises:
            SwarmRefused: The node wants another trainer.
        """
        refusal = self.folder / exchange.refused(self._who)
        if refusal.exists():
            raise SwarmRefused(str(self._read(refusal.name)["reason"]))
        task = self._read(TASK)
        life = task["life"]
        if life == self._greeted:
            return
        said = {"run": self.task["run"], "who": self._who, "step": self.written}
        self._write(exchange.ready(life), said)
        self._greeted = life

    def groups(self, step: int) -> list[list[Row]] | None:
        """Return the groups of ``step``; None if they were not handed out yet.

        Raises:
            SwarmRefused: The node has another number of answers for it than this trainer's
                task said.
        """
        path = self.folder / name_of(GROUPS, step)
        if not path.exists():
            return None
        groups = exchange.decode_groups(path.read_bytes())
        if (found := sum(map(len, groups))) != self.rows:
            raise SwarmRefused(
                f"step {step} has {found} answers, and this trainer takes {self.rows}:"
                " `groups` in learner.toml was changed; start the trainer again"
            )
        return groups

    def wait_groups(self, step: int) -> list[list[Row]]:
        """Return the groups of ``step``, once they are handed out."""
        while True:
            self.greet()
            groups = self.groups(step)
            if groups is not None:
                return groups
            time.sleep(POLL)  # noqa: TID251

    def wants(self, step: int) -> bool:
        """Return True if version ``step`` was not written yet."""
        taken = self._read(TAKEN)["step"] if (self.folder / TAKEN).exists() else self.first
        return step > taken and not (self.folder / name_of(WEIGHTS, step)).exists()

    def publish(self, step: int, save: Callable[[Path], None]) -> None:
        """Write version ``step``, unless it was written before a crash.

        Args:
            step: Number of the run's step.
            save: Writes all weights as a safetensors file, in ``task["dtype"]``.
        """
        if self.wants(step):
            folder = self.folder / name_of(WEIGHTS, step)
            unfinished = self.folder / f".{folder.name}.partial"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            save(unfinished / "model.safetensors")
            shutil.copyfile(Path(self.model) / "config.json", unfinished / "config.json")
            for path in (*unfinished.iterdir(), unfinished):
                sync(path)
            unfinished.rename(folder)
            sync(self.folder)
        self.written = step

    def report(self, step: int, numbers: Mapping[str, float]) -> None:
        """Report the numbers of a step, such as ``loss``, ``k3`` and ``entropy``, after its
        weights."""
        taken = self._read(TAKEN)["step"] if (self.folder / TAKEN).exists() else self.first
        if step > taken:
            self._write(name_of(REPORT, step), dict(numbers))

    def note_checkpoint(self, step: int, path: str | Path) -> None:
        """Tell the node that ``path``, a file or folder, is a checkpoint from which to go on
        after ``step``. Its data is synced first."""
        path = Path(path).absolute()
        for one in (*path.rglob("*"), path, path.parent):
            sync(one)
        self._write(name_of(CHECKPOINT, step), {"path": str(path)})

    def _read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_bytes())
        return found

    def _write(self, name: str, table: Mapping[str, Any]) -> None:
        write(self.folder / name, json.dumps(table).encode())


def write(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``: a crash leaves all of it or nothing."""
    unfinished = path.with_name(f".{path.name}.partial")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Return once a file, or the names in a folder, would survive a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
