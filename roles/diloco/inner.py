"""The calls that a member's session makes to its worker process.

Paths are those of the node's disk. Importing this does not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import trio

from p2p.concurrency import open_bare_nursery
from p2p.errors import ConfigError, MissingDependency, ShoalError, StorageError, WorkerDied
from p2p.node.tables import write_table
from p2p.world import World
from roles.contract.core.diloco import DilocoTerms
from roles.diloco.core.outer import BadPiece
from roles.engines.base import EngineError
from roles.engines.client import confinement_of
from roles.engines.config import EngineConfig
from roles.envs.base import Ration
from roles.envs.client import confinement_of as env_confinement_of
from roles.envs.mix import EnvironmentSetup
from roles.workers.client import Remote, open_remote

logger = logging.getLogger(__name__)

FOLDER: Final = "diloco"
"""Folder of the node's disk for states, records and updates."""
_ARGV: Final = ("roles.diloco.worker",)


@dataclass(frozen=True, slots=True)
class Phase:
    """The result of some inner steps."""

    steps: int
    tokens: int
    loss: float
    """Nats a token, the mean over them."""


@asynccontextmanager
async def open_inner(
    world: World,
    config: EngineConfig,
    terms: DilocoTerms,
    places: Mapping[str, str],
    base: str | None,
    environments: EnvironmentSetup | None = None,
) -> AsyncIterator[InnerEngine]:
    """Run an inner engine for the length of the block: on text, or on ``environments``. Raises
    `ConfigError` on a corpus that cannot be learnt from, `MissingDependency`."""
    for name, place in places.items():
        if not place.startswith("/"):
            raise ConfigError(
                f"the corpus {name} is at {place}: write its whole path, from / on, below"
                " [role.trainer.corpora]"
            )
    readable = tuple(places.values())
    if environments is not None:
        readable += env_confinement_of(environments, Ration()).readable
    confined = replace(confinement_of(world, config, FOLDER), readable=readable)
    async with (
        open_remote(
            world, _ARGV, name="trainer", otherwise=EngineError,
            raises=(ConfigError, MissingDependency, StorageError), confined=confined,
        ) as remote,
        open_bare_nursery() as nursery,
    ):  # fmt: skip
        inner = InnerEngine(world, remote, nursery)
        where = "" if base is None else world.disk.locate(base)
        setup = None if environments is None else write_table(environments)
        inner.size = await remote.start(
            "configure", write_table(config), write_table(terms), dict(places), where, setup
        )
        yield inner
        nursery.cancel_scope.cancel()


class InnerEngine:
    """The process that takes the inner steps and computes everything as large as the model.

    Files are named as on the node's disk. A call that gives the model something to go on with,
    or takes something of it, may raise `WorkerDied`: then its weights are gone, and `restore`
    and `load` begin anew. Whatever needs files alone is done again by itself. All may raise
    `StorageError`.
    """

    def __init__(self, world: World, remote: Remote, nursery: trio.Nursery) -> None:
        self._world, self._remote, self._nursery = world, remote, nursery
        self._turn = trio.Lock()
        self._is_new = False
        """True if another process has begun since the model's weights were loaded."""
        self.size = 0
        """Number of weights in the model."""

    async def _call(self, method: str, *arguments: object) -> Any:
        """Call a method that depends on the model's weights, or sets them."""
        async with self._turn:
            if self._is_new and method not in ("restore", "load"):
                raise WorkerDied("the trainer's process has died, and its weights with it")
            try:
                found = await self._remote.call(method, *arguments)
            except WorkerDied:
                self._is_new = True
                raise
            self._is_new = self._is_new and method != "load"
            return found

    async def _repeat(self, method: str, *arguments: object) -> Any:
        """Call a method that depends on files alone, which another process can do as well. It
        goes on when its caller is cancelled, as views end: half a call costs the process."""
        found: list[Any] = []
        done = trio.Event()

        async def work() -> None:
            while not found:
                async with self._turn:
                    try:
                        found.append(await self._remote.call(method, *arguments))
                    except WorkerDied as error:
                        logger.error("engine_died %s; %s is done again", error, method)
                        self._is_new = True
                    except ShoalError as error:
                        found.append(error)
            done.set()

        self._nursery.start_soon(work)
        await done.wait()
        if isinstance(found[0], ShoalError):
            raise found[0]
        return found[0]

    def _path(self, name: str) -> str:
        return self._world.disk.locate(name)

    async def begin(self, state: str) -> list[bytes]:
        """Write the state of step 0, the same at all members; the digests of its pieces."""
        found: list[bytes] = await self._repeat("begin", self._path(state))
        return found

    async def digests(self, path: str, *, is_state: bool) -> list[bytes]:
        """Return the digests of the pieces in a file: of a state, or of an update or a mean.

        None are returned if the file has another length.
        """
        found: list[bytes] = await self._repeat("digests", self._path(path), is_state)
        return found

    async def sum(
        self,
        first: int,
        parts: Sequence[Sequence[bytes]],
        norms: Sequence[Sequence[float]],
        by: Sequence[float],
    ) -> list[bytes]:
        """Return the pieces of the mean, as `Arithmetic.summed` does in the worker.

        Raises:
            BadPiece: A contributor's signed piece cannot be used.
        """
        succeeded, found = await self._repeat("sum", first, parts, norms, by)
        if not succeeded:
            raise BadPiece(*found)
        pieces: list[bytes] = found
        return pieces

    async def advance(self, before: str, mean: str, after: str, step: int) -> list[bytes]:
        """Write the state after the outer step durably and return the digests of its pieces.

        Raises:
            BadPiece: The mean cannot be decoded.
        """
        paths = map(self._path, (before, mean, after))
        found: int | list[bytes] = await self._repeat("advance", *paths, step)
        if isinstance(found, int):
            raise BadPiece(found)
        return found

    async def load(self, state: str, span: slice, *, is_ahead: bool) -> None:
        """Begin a round from the weights of a state; outside of ``span`` keep the inner
        weights. With ``is_ahead`` steps taken since `encode` are kept."""
        await self._call("load", self._path(state), span.start, span.stop, is_ahead)

    async def train(self, first: int, steps: int, window: int) -> Phase:
        """Take inner steps from number ``first`` of the schedule on, with the windows from
        number ``window`` on."""
        return Phase(*await self._call("train", first, steps, window))

    async def encode(self, update: str, step: int) -> tuple[list[bytes], list[float]]:
        """Write the encoded update and the optimiser's state durably; return digests and norms.

        Raises:
            EngineError: The inner steps have diverged.
        """
        digests, norms = await self._call("encode", self._path(update), step)
        return digests, norms

    async def loss(self) -> float:
        """Return the loss of the loaded weights on held-out windows, in nats a token."""
        return float(await self._call("loss"))

    async def write(self, count: int) -> tuple[str, str]:
        """Return the beginning of a text that is held out, and how the model goes on."""
        prompt, text = await self._call("write", count)
        return prompt, text

    async def restore(self, step: int) -> None:
        """Load the optimiser's state that was saved with the update of ``step``, or else the
        newest state."""
        for damage in await self._call("restore", self._path(FOLDER), step):
            self._world.trace("moments_damaged", error=damage)

    async def export(self, folder: str) -> None:
        """Write the model as a Hugging Face folder."""
        await self._call("export", self._path(folder))
