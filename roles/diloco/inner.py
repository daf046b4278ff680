"""Inner steps as a member's session sees them: in a worker process, or pretended.

Paths are those of the node's disk. Importing this does not import torch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np

from p2p.errors import ConfigError, MissingDependency, StorageError
from p2p.node.tables import write_table
from p2p.world import World
from roles.contract.core.diloco import DilocoTerms
from roles.diloco.core.quant import Values
from roles.engines.base import EngineError
from roles.engines.client import confinement_of
from roles.engines.config import EngineConfig
from roles.envs.base import Ration
from roles.envs.client import confinement_of as env_confinement_of
from roles.envs.mix import EnvironmentSetup
from roles.workers.client import Remote, open_remote

FOLDER: Final = "diloco"
"""Of the node's disk: states, records, updates."""
_ARGV: Final = ("roles.diloco.worker",)
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
    """What takes the inner steps. Every method may raise `WorkerDied`: then it holds
    nothing."""

    size: int
    """Weights of the model."""

    async def begin(self) -> Values:
        """The weights of step 0, the same at all members."""
        ...

    async def load(self, weights: Values, span: slice) -> None:
        """Begin a round from these outer weights; outside ``span`` from the inner ones."""
        ...

    async def shift(self, weights: Values, span: slice) -> None:
        """The same, keeping the steps taken since `update`."""
        ...

    async def train(self, first: int, steps: int, window: int) -> Phase:
        """Inner steps from the number ``first`` of the schedule on, on the windows from
        ``window`` of the walk on."""
        ...

    async def update(self) -> Values:
        """Outer minus inner weights; of data parallel the gradient."""
        ...

    async def loss(self) -> float:
        """Nats a token of the weights that were loaded, on windows that are held out."""
        ...

    async def write(self, text: str, count: int) -> str:
        """What the model would write behind ``text``."""
        ...

    async def save(self, step: int) -> None:
        """Make the optimiser's state durable, as the one that the round after ``step`` begins
        with. Raises `StorageError`."""
        ...

    async def restore(self, step: int) -> bool:
        """Take up what was saved after the round that led to ``step``, or else what is newest;
        whether there was something."""
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
    async with open_remote(
        world, _ARGV, name="trainer", otherwise=EngineError,
        raises=(ConfigError, MissingDependency, StorageError), confined=confined,
    ) as remote:  # fmt: skip
        inner = WorkerInner(world, remote)
        where = "" if base is None else world.disk.locate(base)
        setup = None if environments is None else write_table(environments)
        await inner.configure(config, terms, places, where, setup)
        yield inner


class WorkerInner:
    """An `InnerEngine` in a worker process."""

    def __init__(self, world: World, remote: Remote) -> None:
        self._world = world
        self._remote = remote
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
        return await self._remote.call("call", method, *arguments)

    def _path(self, name: str) -> str:
        return self._world.disk.locate(f"{FOLDER}/{name}")

    async def _read(self, name: str) -> Values:
        data = await self._world.disk.read(f"{FOLDER}/{name}")
        if len(data) != 4 * self.size:
            raise StorageError(f"{FOLDER}/{name} has {len(data)} bytes, not {4 * self.size}")
        return np.frombuffer(data, "<f4").astype(np.float32)

    async def begin(self) -> Values:
        """See `InnerEngine`."""
        await self._call("begin", self._path("begin"))
        return await self._read("begin")

    async def load(self, weights: Values, span: slice) -> None:
        """See `InnerEngine`."""
        await self._begin_from("load", weights, span)

    async def shift(self, weights: Values, span: slice) -> None:
        """See `InnerEngine`."""
        await self._begin_from("shift", weights, span)

    async def _begin_from(self, method: str, weights: Values, span: slice) -> None:
        await self._world.disk.write(f"{FOLDER}/outer", weights.astype("<f4").tobytes())
        await self._call(method, self._path("outer"), span.start, span.stop)

    async def train(self, first: int, steps: int, window: int) -> Phase:
        """See `InnerEngine`."""
        return Phase(*await self._call("train", first, steps, window))

    async def update(self) -> Values:
        """See `InnerEngine`."""
        await self._call("update", self._path("update"))
        return await self._read("update")

    async def loss(self) -> float:
        """See `InnerEngine`."""
        return float(await self._call("loss"))

    async def write(self, text: str, count: int) -> str:
        """See `InnerEngine`."""
        return str(await self._call("write", text, count))

    async def save(self, step: int) -> None:
        """See `InnerEngine`."""
        moments, previous = self._path("moments"), self._path("moments.previous")
        await self._call("save", moments, previous, step)

    async def restore(self, step: int) -> bool:
        """See `InnerEngine`. Killed between a save and what it was for, a member finds the
        moments of the round that it begins again in the older file."""
        newest = await self._restored("moments")
        if newest == step:
            return True
        if await self._restored("moments.previous") == step:
            return True
        return await self._restored("moments") is not None

    async def _restored(self, name: str) -> int | None:
        """Of which step the moments are that were taken up; None if there are none."""
        try:
            found = await self._call("restore", self._path(name))
        except EngineError as error:
            self._world.trace("moments_damaged", file=name, error=str(error))
            return None
        return None if found is None else int(found)

    async def export(self, folder: str) -> None:
        """See `InnerEngine`."""
        await self._call("export", self._world.disk.locate(folder))


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
        self._goal = np.random.Generator(np.random.PCG64(config.seed & 0xFFFF)).standard_normal(
            size, np.float32
        )
        self._outer = np.zeros(size, np.float32)
        self._inner = self._sent = self._outer

    async def begin(self) -> Values:
        """See `InnerEngine`."""
        return np.zeros(self.size, np.float32)

    async def load(self, weights: Values, span: slice) -> None:
        """See `InnerEngine`."""
        self._outer, self._inner = weights, self._inner.copy()
        self._inner[span] = weights[span]

    async def shift(self, weights: Values, span: slice) -> None:
        """See `InnerEngine`."""
        self._outer, self._inner = weights, self._inner.copy()
        self._inner[span] += weights[span] - self._sent[span]

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

    async def update(self) -> Values:
        """See `InnerEngine`."""
        self._sent = self._inner
        return self._outer - self._inner

    async def loss(self) -> float:
        """See `InnerEngine`."""
        return self._distance()

    async def write(self, text: str, count: int) -> str:
        """See `InnerEngine`."""
        return text[:count]

    async def save(self, step: int) -> None:
        """See `InnerEngine`; there is nothing to keep."""

    async def restore(self, step: int) -> bool:
        """See `InnerEngine`."""
        return True

    async def export(self, folder: str) -> None:
        """See `InnerEngine`; there is nothing to write."""
