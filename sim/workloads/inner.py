"""Pretended inner steps of a member's engine, over a simulated disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from p2p.world import World
from roles.contract.core.diloco import DilocoTerms
from roles.diloco.core.outer import Arithmetic, digests_of
from roles.diloco.core.pieces import digest_of
from roles.diloco.core.quant import Values
from roles.diloco.inner import InnerEngine, Phase
from roles.engines.config import EngineConfig

STEP_RATE: Final = 400e6
"""Bytes of state that an outer step and its digest take in a second, for simulated time."""
SUM_RATE: Final = 500e6
"""Bytes of float32 that are decoded and added in a second, for simulated time."""
FAKE_WEIGHTS: Final = 4096
"""Weights of the pretended model: few, since a simulation moves every byte."""


class FakeInner(InnerEngine):
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
        data = self.arithmetic.begun(np.zeros(self.size, np.float32)).tobytes()
        await self._world.disk.replace(state, data)
        return digests_of(self.arithmetic.state_grid, data)

    async def digests(self, path: str, *, is_state: bool) -> list[bytes]:
        grid = self.arithmetic.state_grid if is_state else self.arithmetic.grid
        return digests_of(grid, await self._world.disk.read(path))

    async def sum(
        self,
        first: int,
        parts: Sequence[Sequence[bytes]],
        norms: Sequence[Sequence[float]],
        by: Sequence[float],
    ) -> list[bytes]:
        cost = 4 * self.arithmetic.grid.piece * len(parts[0]) / SUM_RATE
        return await self._world.run_blocking(
            self.arithmetic.summed, first, parts, norms, by, cost=cost
        )

    async def advance(self, before: str, mean: str, after: str, step: int) -> list[bytes]:
        disk, arithmetic = self._world.disk, self.arithmetic
        values = np.frombuffer(await disk.read(before), "<f4").copy()
        await self._world.run_blocking(
            arithmetic.advance, arithmetic.rows(values), await disk.read(mean), step,
            cost=values.nbytes / STEP_RATE,
        )  # fmt: skip
        await disk.replace(after, values.tobytes())
        return digests_of(arithmetic.state_grid, values.tobytes())

    async def load(self, state: str, span: slice, *, is_ahead: bool) -> None:
        values = np.frombuffer(await self._world.disk.read(state), "<f4")
        self._outer, self._inner = values[: self.size], self._inner.copy()
        ahead = self._inner[span] - self._sent[span] if is_ahead else np.float32(0)
        self._inner[span] = self._outer[span] + ahead

    async def train(self, first: int, steps: int, window: int) -> Phase:
        """Take inner steps, each of which moves the weights a hundredth of the way."""
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
        """Return outer minus inner weights; hostile subclasses return something else."""
        return self._outer - self._inner

    async def encode(self, update: str, step: int) -> tuple[list[bytes], list[float]]:
        self._sent = self._inner
        pieces, norms = await self._world.run_blocking(
            self.arithmetic.encoded, self.update(), step,
            cost=4 * self.arithmetic.grid.count / STEP_RATE,
        )  # fmt: skip
        await self._world.disk.replace(update, b"".join(pieces))
        return list(map(digest_of, pieces)), norms

    async def loss(self) -> float:
        return self._distance()

    async def write(self, count: int) -> tuple[str, str]:
        return "", "shoal"[:count]

    async def restore(self, step: int) -> None:
        """Do nothing: this engine has no state to restore."""

    async def export(self, folder: str) -> None:
        """Do nothing: this engine has no model to write."""
