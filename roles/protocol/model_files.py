"""Files that all policies of a run share (base and capsules), kept once on a node's disk.

Theory of operation
-------------------
A policy of a run with a base is a whole folder in Hugging Face's layout, and SHARDCAST removes
it when it is old. The environment's process reads tokenizer, template and capsules whenever it
is started, also when no policy is here yet: so the small files are copied out of the first
policy that has them as the run pins them, to `FOLDER`, and read from there. On a trainer that
folder holds the whole base and the capsules, put there by its operator, and is what the trainer
publishes as policy 0.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Final

from p2p.errors import ConfigError, StorageError
from p2p.node.node import Node
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import MIB
from p2p.world import World
from roles.contract import Run
from roles.contract.core.pin import (
    CAPSULE_SUFFIX,
    OPTIONAL,
    REQUIRED,
    WEIGHTS_SUFFIX,
    FilePin,
    counts,
)

logger = logging.getLogger(__name__)

FOLDER: Final = "model"
"""Folder of these files on the node's disk."""
MAX_SMALL: Final = 64 * MIB
"""Most bytes of a file that is copied through memory: tokenizers of the largest vocabularies
have 33 MB."""
PIECE: Final = 16 * MIB
"""Bytes read and hashed at a time."""
HASH_RATE: Final = 1e9
"""Bytes of SHA-256 that one core computes in a second."""


def small_pins(run: Run) -> tuple[FilePin, ...]:
    """Return the pins of all files of the base except weights; empty in a run without a
    base."""
    return tuple(pin for pin in run.terms.carried if not pin.name.endswith(WEIGHTS_SUFFIX))


async def keep_model_files(node: Node, run: Run) -> str | None:
    """Return the folder with tokenizer and template, once it is complete; None in a run without
    a base.

    Waits for a policy if it is not. Raises `StorageError`, and `ConfigError` if a pinned file
    is too large.
    """
    world, pins = node.world, small_pins(run)
    for pin in pins:
        if pin.size > MAX_SMALL:
            raise ConfigError(
                f"the run pins {pin.size:,} bytes of {pin.name}, over the {MAX_SMALL:,} that a"
                " node keeps of such a file"
            )
    await _forget_unpinned(world, run)
    version = PolicyVersion(0)
    while missing := [pin for pin in pins if not await _is_sound(world, _kept(pin), pin)]:
        version = await node.shardcast.wait_policy(version)
        with node.shardcast.pin(version) as folder:
            for pin in missing:
                path = f"{folder}/{pin.name}"
                if await _is_sound(world, path, pin):
                    await world.disk.replace(_kept(pin), await world.disk.read(path))
                else:
                    logger.warning(
                        "model_files version=%d: %s is not as the run pins it; the next policy"
                        " is waited for", version, pin.name,
                    )  # fmt: skip
        version = PolicyVersion(version + 1)
    return FOLDER if pins else None


async def check_base(world: World, run: Run) -> None:
    """Raise `ConfigError` unless `FOLDER` has the whole base and no other file that would count
    as part of the model. A README or a licence may lie beside it, since no policy has it."""
    for pin in run.terms.carried:
        if not counts(pin.name):
            raise ConfigError(f"the run pins {pin.name}, which is no part of a model")
        if not await _is_sound(world, _kept(pin), pin):
            raise ConfigError(
                f"{world.disk.locate(_kept(pin))} is missing, or not the file that the run"
                " pins: a trainer begins from the run's base and its capsules; copy them there"
            )
    pinned = {pin.name for pin in run.terms.carried}
    found = await world.disk.list(FOLDER)
    strange = [name for name in found if counts(name) and name not in pinned]
    if strange:
        raise ConfigError(
            f"{world.disk.locate(FOLDER)} holds {', '.join(strange)!r:.200}, which the run does"
            " not pin, and which would be part of the model: remove it"
        )


async def _forget_unpinned(world: World, run: Run) -> None:
    """Remove the files that another edition of the run pinned. A template that is left over
    would be used, and honest work would have another prompt than everywhere else."""
    pinned = {pin.name for pin in run.terms.carried}
    if not pinned:
        return
    capsules = [one for one in await world.disk.list(FOLDER) if one.endswith(CAPSULE_SUFFIX)]
    for name in (*REQUIRED, *OPTIONAL, *capsules):
        path = f"{FOLDER}/{name}"
        if name not in pinned and await world.disk.size(path) is not None:
            logger.warning("%s is removed: the run does not pin it", world.disk.locate(path))
            await world.disk.remove(path)


def _kept(pin: FilePin) -> str:
    return f"{FOLDER}/{pin.name}"


async def _is_sound(world: World, path: str, pin: FilePin) -> bool:
    """Return True if the file has the pinned size and digest."""
    try:
        if await world.disk.size(path) != pin.size:
            return False
        digest = hashlib.sha256()
        for start in range(0, pin.size, PIECE):
            piece = await world.disk.read(path, start, min(PIECE, pin.size - start))
            await world.run_blocking(digest.update, piece, cost=len(piece) / HASH_RATE)
    except StorageError:
        return False
    return digest.digest() == pin.digest
