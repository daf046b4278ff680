"""The trainer's checkpoints and policies on its disk.

A policy is there for each step, for SHARDCAST to serve; a checkpoint for every
``checkpoint_every``-th, in two generations. A checkpoint may be damaged, and then the trainer
begins at the one before it: so the deliveries of all steps after that one are kept.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from p2p.shardcast.manifest import PolicyVersion
from p2p.world import Disk
from roles.engines.adapters import TRAVELS
from roles.engines.base import Learner
from roles.shared.durable import Durable

CHECKPOINT: Final = "trainer/checkpoint"
WEIGHTS: Final = "trainer/weights"
"""Folder of one safetensors file per version, or one folder: SHARDCAST serves from it and wants
it unchanged."""
KEPT_WEIGHTS: Final = 8
"""Versions whose files are kept: more than SHARDCAST keeps, and than may be pinned at a
time."""


class PolicyFiles:
    """The checkpoints and policies of an engine, on disk."""

    def __init__(
        self,
        engine: Learner,
        disk: Disk,
        durable: Durable,
        *,
        base: str = "",
        checkpoint_every: int = 1,
        adapters: bool = False,
    ) -> None:
        """``adapters``: whether a policy may travel as an adapter to version 0."""
        self.durable = durable
        self.checkpoint = 0
        """Step of the newest checkpoint, as far as this life knows."""
        self.covered = 0
        """Step of the one before it: all after it may have to be learnt again."""
        self._engine = engine
        self._disk = disk
        self._base = base
        self._every = checkpoint_every
        self._sends_adapters = adapters

    def weights(self, step: int) -> str:
        """Return where the policy of ``step`` is: a file, or a folder if the run has a base."""
        return f"{WEIGHTS}/{step:08d}{'' if self._base else '.safetensors'}"

    def adapter(self, step: int) -> tuple[str, PolicyVersion] | None:
        """Return where the adapter of ``step`` would be, and the version that it adds to; None
        if policies travel whole."""
        return (
            (self.weights(step) + TRAVELS, PolicyVersion(0)) if self._sends_adapters else None
        )

    async def open(self) -> int:
        """Bring the engine to its checkpoint, or to the first policy. Returns the step."""
        self.checkpoint = await self._engine.open(CHECKPOINT, self._base)
        return self.checkpoint

    async def adopt(self, weights: str, step: int) -> None:
        """Bring the engine to ``weights``, the policy of ``step``, without its optimiser."""
        await self._engine.adopt(weights, step, self._base)

    async def keep(self, step: int, *, is_last: bool = False) -> None:
        """Write the policy of ``step``, and a checkpoint if it is time for one."""
        if step % self._every == 0 or is_last:
            await self.keep_checkpoint(step, self.weights(step))
        else:
            await self.durable.insist(partial(self._engine.save, "", self.weights(step)))

    async def keep_found(self, step: int, *, is_published: bool, is_signed: bool) -> None:
        """After a start: write what is missing of ``step``, to which the engine has come.

        Weights that may be signed and were learnt again are not written again: another CPU
        might have rounded them otherwise. Those of a checkpoint come out as they were, and what
        was cut off by a crash is mended so.
        """
        if step == self.checkpoint and is_published:
            return
        may_differ = is_signed and step != self.checkpoint
        is_written = is_published or (
            may_differ and bool(await self._disk.walk(self.weights(step), 1))
        )
        await self.keep_checkpoint(step, "" if is_written else self.weights(step))

    async def keep_checkpoint(self, step: int, weights: str) -> None:
        """Write a checkpoint, and the policy unless ``weights`` is empty."""
        await self.durable.insist(partial(self._engine.save, CHECKPOINT, weights))
        self.covered, self.checkpoint = self.checkpoint, step

    async def forget_before(self, step: int) -> None:
        """Remove the policy that became too old with ``step``: each step leaves one."""
        old = self.weights(step - KEPT_WEIGHTS)
        is_base = self._sends_adapters and step == KEPT_WEIGHTS
        if step >= KEPT_WEIGHTS and not is_base:
            for path in (old, old + TRAVELS):
                await self.durable.insist(partial(self._disk.remove, path))
