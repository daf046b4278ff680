"""Inner steps as a member's session sees them: in a worker process, or pretended.

Paths are those of the node's disk. Importing this does not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import trio

from p2p.concurrency import open_bare_nursery
from p2p.errors import ConfigError, MissingDependency, ShoalError, StorageError, WorkerDied
from p2p.node.tables import write_table
from p2p.world import World
from roles.contract.core.diloco import DilocoTerms
from roles.diloco.core.outer import Arithmetic, BadPiece, digests_of
from roles.diloco.core.pieces import digest_of
from roles.diloco.core.quant import Values
from roles.engines.base import EngineError
from roles.engines.client import confinement_of
from roles.engines.config import EngineConfig
from roles.envs.base import Ration
from roles.envs.client import confinement_of as env_confinement_of
from roles.envs.mix import EnvironmentSetup
from roles.workers.client import Remote, open_remote

logger = logging.getLogger(__name__)

FOLDER: Final = "diloco"
"""Of the node's disk: states, records, updates."""
_ARGV: Final = ("roles.diloco.worker",)
STEP_RATE: Final = 400e6
"""Bytes of state that an outer step and its digest take in a second, for simulated time."""
SUM_RATE: Final = 500e6
"""Bytes of float32 that are decoded and added in a second, for simulated time."""
FAKE_WEIGHTS: Final = 4096
"""Of the model that is pretended: small, since a simulation moves every byte of it."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What some inner steps came to."""

    steps: int
    tokens: int
    loss: float
    """Nats a token, the mean over them."""


class InnerEngine(Protocol):
    """What takes the inner steps, and computes whatever is as large as the model.

    Files are named as on the node's disk. A call that gives the model something to go on with,
    or takes something of it, may raise `WorkerDied`: then its weights are gone, and `restore`
    and `load` begin anew. Whatever needs files alone is done again by itself. All may raise
    `StorageError`.
    """

    size: int
    """Weights of the model."""

    async def begin(self, state: str) -> list[bytes]:
        """Write the state of step 0, the same at all members; the digests of its pieces."""
        ...

    async def digests(self, path: str, *, is_state: bool) -> list[bytes]:
        """The digests of the pieces in a file: of a state, or of an update or a mean. None if
        it is not as long as these."""
        ...

    async def sum(
        self,
        first: int,
        parts: Sequence[Sequence[bytes]],
        norms: Sequence[Sequence[float]],
        by: Sequence[float],
    ) -> list[bytes]:
        """See `Arithmetic.summed`, which it is: it raises `BadPiece`."""
        ...

    async def advance(self, before: str, mean: str, after: str, step: int) -> list[bytes]:
        """Write the state ``after`` the outer step, durably; the digests of its pieces. Raises
        `BadPiece` if the mean cannot be read."""
        ...

    async def load(self, state: str, span: slice, *, is_ahead: bool) -> None:
        """Begin a round from the weights of a state; outside ``span`` from the inner ones. With
        ``is_ahead`` steps taken since `encode` are kept."""
        ...

    async def train(self, first: int, steps: int, window: int) -> Phase:
        """Inner steps from the number ``first`` of the schedule on, on the windows from
        ``window`` of the walk on."""
        ...

    async def encode(self, update: str, step: int) -> tuple[list[bytes], list[float]]:
        """Write what these steps came to as it travels at an outer step, and the optimiser's
        state, durably; digests and norms of the pieces. Raises `EngineError` if the steps have
        diverged."""
        ...

    async def loss(self) -> float:
        """Nats a token of the weights that were loaded, on windows that are held out."""
        ...

    async def write(self, text: str, count: int) -> str:
        """What the model would write behind ``text``."""
        ...

    async def restore(self, step: int) -> None:
        """Take up the optimiser's state that was saved with the update of ``step``, or else
        what is newest."""
        ...

    async def export(self, folder: str) -> None:
        """Write the model as a Hugging Face folder."""
        ...


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
    if config.kind == "fake":
        yield FakeInner(world, config, terms)
        return
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
        inner = WorkerInner(world, remote, nursery)
        where = "" if base is None else world.disk.locate(base)
        setup = None if environments is None else write_table(environments)
        await inner.configure(config, terms, places, where, setup)
        yield inner
        nursery.cancel_scope.cancel()


class WorkerInner:
    """An `InnerEngine` in a worker process."""

    def __init__(self, world: World, remote: Remote, nursery: trio.Nursery) -> None:
        self._world, self._remote, self._nursery = world, remote, nursery
        self._turn = trio.Lock()
        self._is_new = False
        """Whether another process has begun since the model's weights were loaded."""
        self.size = 0

    async def configure(
        self,
        config: EngineConfig,
        terms: DilocoTerms,
        places: Mapping[str, str],
        base: str,
        environments: Mapping[str, Any] | None,
    ) -> None:
        """Once, before anything else."""
        self.size = await self._remote.start(
            "configure", write_table(config), write_table(terms), dict(places), base,
            environments,
        )  # fmt: skip

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
        """See `InnerEngine`."""
        found: list[bytes] = await self._repeat("begin", self._path(state))
        return found

    async def digests(self, path: str, *, is_state: bool) -> list[bytes]:
        """See `InnerEngine`."""
        found: list[bytes] = await self._repeat("digests", self._path(path), is_state)
        return found

    async def sum(
        self,
        first: int,
        parts: Sequence[Sequence[bytes]],
        norms: Sequence[Sequence[float]],
        by: Sequence[float],
    ) -> list[bytes]:
        """See `InnerEngine`."""
        succeeded, found = await self._repeat("sum", first, parts, norms, by)
        if not succeeded:
            raise BadPiece(*found)
        pieces: list[bytes] = found
        return pieces

    async def advance(self, before: str, mean: str, after: str, step: int) -> list[bytes]:
        """See `InnerEngine`."""
        paths = map(self._path, (before, mean, after))
        found: int | list[bytes] = await self._repeat("advance", *paths, step)
        if isinstance(found, int):
            raise BadPiece(found)
        return found

    async def load(self, state: str, span: slice, *, is_ahead: bool) -> None:
        """See `InnerEngine`."""
        await self._call("load", self._path(state), span.start, span.stop, is_ahead)

    async def train(self, first: int, steps: int, window: int) -> Phase:
        """See `InnerEngine`."""
        return Phase(*await self._call("train", first, steps, window))

    async def encode(self, update: str, step: int) -> tuple[list[bytes], list[float]]:
        """See `InnerEngine`."""
        digests, norms = await self._call("encode", self._path(update), step)
        return digests, norms

    async def loss(self) -> float:
        """See `InnerEngine`."""
        return float(await self._call("loss"))

    async def write(self, text: str, count: int) -> str:
        """See `InnerEngine`."""
        return str(await self._call("write", text, count))

    async def restore(self, step: int) -> None:
        """See `InnerEngine`."""
        for damage in await self._call("restore", self._path(FOLDER), step):
            self._world.trace("moments_damaged", error=damage)

    async def export(self, folder: str) -> None:
        """See `InnerEngine`."""
        await self._call("export", self._path(folder))


class FakeInner:
    """Pretends, in simulations: weights that go towards a point, with noise by member and
    step."""

    def __init__(
        self,
        world: World,
        config: EngineConfig,
        terms: DilocoTerms,
        size: int = FAKE_WEIGHTS,
    ) -> None:
        self._world, self._config, self._terms = world, config, terms
        self.size = size
        self.arithmetic = Arithmetic(terms, size)
        self._goal = np.random.Generator(np.random.PCG64(config.seed & 0xFFFF)).standard_normal(
            size, np.float32
        )
        self._outer = np.zeros(size, np.float32)
        self._inner = self._sent = self._outer

    async def begin(self, state: str) -> list[bytes]:
        """See `InnerEngine`."""
        data = self.arithmetic.begun(np.zeros(self.size, np.float32)).tobytes()
        await self._world.disk.replace(state, data)
        return digests_of(self.arithmetic.state_grid, data)

    async def digests(self, path: str, *, is_state: bool) -> list[bytes]:
        """See `InnerEngine`."""
        grid = self.arithmetic.state_grid if is_state else self.arithmetic.grid
        return digests_of(grid, await self._world.disk.read(path))

    async def sum(
        self,
        first: int,
        parts: Sequence[Sequence[bytes]],
        norms: Sequence[Sequence[float]],
        by: Sequence[float],
    ) -> list[bytes]:
        """See `InnerEngine`."""
        cost = 4 * self.arithmetic.grid.piece * len(parts[0]) / SUM_RATE
        return await self._world.run_blocking(
            self.arithmetic.summed, first, parts, norms, by, cost=cost
        )

    async def advance(self, before: str, mean: str, after: str, step: int) -> list[bytes]:
        """See `InnerEngine`."""
        disk, arithmetic = self._world.disk, self.arithmetic
        values = np.frombuffer(await disk.read(before), "<f4").copy()
        await self._world.run_blocking(
            arithmetic.advance, arithmetic.rows(values), await disk.read(mean), step,
            cost=values.nbytes / STEP_RATE,
        )  # fmt: skip
        await disk.replace(after, values.tobytes())
        return digests_of(arithmetic.state_grid, values.tobytes())

    async def load(self, state: str, span: slice, *, is_ahead: bool) -> None:
        """See `InnerEngine`."""
        values = np.frombuffer(await self._world.disk.read(state), "<f4")
        self._outer, self._inner = values[: self.size], self._inner.copy()
        ahead = self._inner[span] - self._sent[span] if is_ahead else np.float32(0)
        self._inner[span] = self._outer[span] + ahead

    async def train(self, first: int, steps: int, window: int) -> Phase:
        """See `InnerEngine`; each step goes a hundredth of the way."""
        await self._world.sleep(steps * self._config.profile.step_seconds)
        noise = np.random.Generator(np.random.PCG64(window)).standard_normal(
            self.size, np.float32
        )
        share = np.float32(1 - 0.99**steps)
        near = self._goal + np.float32(0.1) * noise - self._inner
        self._inner = self._inner + share * near
        return Phase(
            steps, steps * self._terms.sequences * self._terms.window, self._distance()
        )

    def _distance(self) -> float:
        return float(np.mean(np.square(self._inner - self._goal)))

    def update(self) -> Values:
        """Outer minus inner weights; hostile heirs say something else."""
        return self._outer - self._inner

    async def encode(self, update: str, step: int) -> tuple[list[bytes], list[float]]:
        """See `InnerEngine`."""
        self._sent = self._inner
        pieces, norms = await self._world.run_blocking(
            self.arithmetic.encoded, self.update(), step,
            cost=4 * self.arithmetic.grid.count / STEP_RATE,
        )  # fmt: skip
        await self._world.disk.replace(update, b"".join(pieces))
        return list(map(digest_of, pieces)), norms

    async def loss(self) -> float:
        """See `InnerEngine`."""
        return self._distance()

    async def write(self, text: str, count: int) -> str:
        """See `InnerEngine`."""
        return text[:count]

    async def restore(self, step: int) -> None:
        """See `InnerEngine`; there is nothing to keep."""

    async def export(self, folder: str) -> None:
        """See `InnerEngine`; there is nothing to write."""
