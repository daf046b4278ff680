"""Finds the model that a folder is about: a run's newest policy, an export, a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from p2p.errors import BadMessage, ConfigError
from roles.contract import Run, decode_run_untrusted
from roles.models.bundle import CONFIG
from roles.protocol.model_files import FOLDER as BASE

_KEPT: Final = re.compile(r"([0-9]{8})(?:\.safetensors)?")
"""Matches the name of a trainer's policy, by its step (`roles.trainer.policies`)."""
_PULLED: Final = re.compile(r"v([0-9]{16})-[0-9a-f]{8}\.files")
"""Matches the name of a policy in a node's store (`p2p.shardcast.store`), which may still be on
its way.
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A model on this disk."""

    path: Path
    """A folder in Hugging Face's layout, or one file of weights."""
    label: str
    run: Run | None = None
    """The run that it is a policy of, if the run file lies beside it."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models in a folder."""

    newest: Found
    first: Found | None
    """The model that the run began with, if it is still there."""


def find_models(folder: Path, policy: int | None = None) -> Models:
    """Return the newest model of ``folder``, or policy number ``policy``.

    Raises:
        ConfigError: There is no such model.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: name that of a run, of a node or of a model")
    if (folder / CONFIG).is_file():
        if policy is not None:
            raise ConfigError(f"{folder} is one model: --policy is for the folder of a run")
        return Models(Found(folder, folder.name), None)
    nodes = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    run = next(filter(None, map(_run, nodes)), None)
    name = run.name if run is not None else folder.name
    policies: dict[int, Path] = {}
    for node in nodes:
        policies = {**dict(_pulled(node)), **policies, **dict(_kept(node))}
    if policies:
        chosen = max(policies) if policy is None else policy
        if chosen not in policies:
            there = ", ".join(map(str, sorted(policies)))
            raise ConfigError(f"{folder} has no policy {chosen}; it has {there}")
        bases = (node / BASE for node in nodes)
        whole = (path for path in bases if any(path.glob("*.safetensors")))
        first = next(whole, policies.get(0))
        return Models(
            Found(policies[chosen], f"policy {chosen} of {name}", run),
            None if first is None or not chosen else Found(first, f"policy 0 of {name}", run),
        )
    exports = [node / "diloco" / "export" for node in nodes]
    exports = [path for path in exports if (path / CONFIG).is_file()]
    if exports:
        newest = max(exports, key=lambda path: (path / CONFIG).stat().st_mtime)
        return Models(
            Found(newest, f"{name}, as {newest.parent.parent.name} exported it"), None
        )
    raise ConfigError(
        f"{folder} holds no model yet: name the folder of a run that has published a policy"
        " (shoal run start), of a node, of an export, or of a model (shoal models fetch)"
    )


def _run(node: Path) -> Run | None:
    try:
        return decode_run_untrusted((node / "run.shoal").read_bytes())
    except (OSError, BadMessage):
        return None


def _kept(node: Path) -> Iterator[tuple[int, Path]]:
    for path in (node / "trainer" / "weights").glob("*"):
        if number := _KEPT.fullmatch(path.name):
            yield int(number[1]), path


def _pulled(node: Path) -> Iterator[tuple[int, Path]]:
    for path in (node / "store").glob("*/*.files"):
        number = _PULLED.fullmatch(path.name)
        is_whole = not (path.parent / f"{path.stem}.part").exists()
        if number and is_whole and (path.parent / f"{path.stem}.policy").exists():
            yield int(number[1]), path
