"""The layout of a run's folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from roles.contract import Run
from roles.rl.learner import FILE as LEARNER

PEOPLE: Final = "people.toml"
TRAINER: Final = "trainer"
VALIDATOR: Final = "validator"
INFERENCE: Final = "inference"


class RunFolder:
    """The folder that ``shoal run init`` makes: each node has a folder of its own in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.draft = path / "draft.toml"  # what the owner writes
        self.people = path / PEOPLE  # the ids of trainers and validators
        self.document = path / "run.shoal"  # what the owner signed
        self.owner = path / "owner.key"  # the key that signs; no node needs it
        self.config = path / "node.toml"  # the configuration of all nodes
        self.learner = self.node(TRAINER) / LEARNER  # how the trainer learns
        self.data = path / "data"  # the files of questions that environments read

    def config_of(self, name: str) -> Path:
        """Return the configuration file of one node: its own ``NAME.toml``, or the common
        one."""
        own = self.path / f"{name}.toml"
        return own if own.exists() else self.config

    def node(self, name: str) -> Path:
        """Return the folder of a node, its ``--data``."""
        return self.path / name

    def cast(self) -> Mapping[str, str]:
        """Return the nodes of this folder with their roles, the trainer first."""
        several = {role: self._numbered(role) for role in (TRAINER, INFERENCE)}
        names = several[TRAINER] or [TRAINER, VALIDATOR, *several[INFERENCE]]
        return {name: name.partition("-")[0] for name in names}

    def _numbered(self, role: str) -> list[str]:
        found = [path.parent.name for path in self.path.glob(f"{role}-*/key")]
        return sorted(found, key=lambda name: (len(name), name))

    @property
    def trainers(self) -> list[Path]:
        """The folders of the trainers: one, or several in a run of DiLoCo."""
        return [self.node(name) for name, role in self.cast().items() if role == TRAINER]


def lay_base(source: Path, target: Path, run: Run) -> None:
    """Put the files that ``run`` pins where its trainer looks for them."""
    link_files(source, target, [pin.name for pin in run.terms.model.base])


def link_files(source: Path, target: Path, names: Iterable[str] | None = None) -> None:
    """Put all or the named files of ``source`` into ``target``, as links if possible."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names or [path.name for path in source.iterdir() if path.is_file()]:
        (target / name).unlink(missing_ok=True)
        try:
            os.link((source / name).resolve(), target / name)
        except OSError:  # another disk
            shutil.copyfile(source / name, target / name)
