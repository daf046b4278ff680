"""What lies where in the folder of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from roles.rl.learner import FILE as LEARNER

TRAINER: Final = "trainer"
VALIDATOR: Final = "validator"
INFERENCE: Final = "inference"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder that ``shoal run init`` makes: each node has a folder of its own in it."""

    path: Path

    @property
    def draft(self) -> Path:
        """What the owner writes."""
        return self.path / "draft.toml"

    @property
    def document(self) -> Path:
        """What the owner signed."""
        return self.path / "run.shoal"

    @property
    def owner(self) -> Path:
        """The key that signs; no node needs it."""
        return self.path / "owner.key"

    @property
    def config(self) -> Path:
        """The configuration of all nodes."""
        return self.path / "node.toml"

    @property
    def learner(self) -> Path:
        """How the trainer learns."""
        return self.node(TRAINER) / LEARNER

    @property
    def data(self) -> Path:
        """The files of questions that environments read."""
        return self.path / "data"

    def node(self, name: str) -> Path:
        """What a node keeps: ``--data``."""
        return self.path / name

    def cast(self) -> Mapping[str, str]:
        """The nodes of this folder with their roles, the trainer first."""
        names = [TRAINER, VALIDATOR, *self._workers()]
        return {name: name.partition("-")[0] for name in names}

    def _workers(self) -> list[str]:
        found = [path.parent.name for path in self.path.glob(f"{INFERENCE}-*/key")]
        return sorted(found, key=lambda name: (len(name), name))

    @staticmethod
    def workers(count: int) -> list[str]:
        """The names of so many inference nodes."""
        return [f"{INFERENCE}-{number}" for number in range(1, count + 1)]
