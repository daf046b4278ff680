"""The files that a push or a server offers: where they lie, and the key that signs them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from blake3 import blake3

from p2p.cast.ticket import SECRET_BYTES, is_name
from p2p.cast.view import Teller
from p2p.errors import ConfigError
from p2p.machine import RealWorld, open_world
from p2p.node.usage import expanded
from p2p.world import World

SOURCE: Final = "source"
"""Name under which a pusher's files appear in its state: their real place is a mount of its
disk."""


def existing(path: Path) -> Path:
    """``path``, absolute. Raises `ConfigError` if nothing is there, or its name cannot be one
    elsewhere."""
    path = expanded(path).absolute()
    if not path.exists():
        raise ConfigError(f"there is nothing at {path}")
    if not is_name(path.name):
        raise ConfigError(f"{path.name!r} cannot be a name elsewhere; give it another")
    return path


def state_of(path: Path) -> Path:
    """The folder where a pusher keeps its key: one for each path, so that the same command
    makes the same ticket."""
    base = expanded(Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state"))
    return base / "shoal" / "push" / blake3(os.fsencode(path)).hexdigest()[:16]


@asynccontextmanager
async def mounted(state: Path, path: Path) -> AsyncIterator[tuple[RealWorld, str]]:
    """A world over ``state`` in which ``path`` is mounted, and the name of that mount."""
    is_folder = path.is_dir()  # noqa: ASYNC240 - once, before anything else runs
    folder, source = (path, SOURCE) if is_folder else (path.parent, f"{SOURCE}/{path.name}")
    async with open_world(state, mounts={SOURCE: folder}) as world:
        yield world, source


class Changes:
    """Tells a person, once for each file, that it is not what is offered any more."""

    def __init__(self, again: str, teller: Teller, lone: str = "") -> None:
        """``lone`` is the name of what is offered if that is one file."""
        self._again = again
        self._teller = teller
        self._lone = lone
        self._told: set[str] = set()

    def tell(self, name: str, what: str = "changed") -> None:
        """Say what is wrong with a file, given its path in the folder."""
        name = self._lone or name
        if name not in self._told:
            self._told.add(name)
            self._teller.event("changed", f"{name} {what}: {self._again}", path=name, what=what)


async def join_secret(world: World) -> bytes:
    """The join secret of this pusher; made once."""
    try:
        secret = await world.disk.read("secret")
    except FileNotFoundError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        secret = world.entropy(SECRET_BYTES)
        await world.disk.replace("secret", secret)
    return secret
