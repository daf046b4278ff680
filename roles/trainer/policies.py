"""The trainer's checkpoints and policies on its disk.

Each step has a policy, which SHARDCAST serves; every ``checkpoint_every``-th step has a
checkpoint, of which two generations are kept. If a checkpoint is damaged, the trainer starts
from the one before it, so the places of all steps after that one are kept too.
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
"""Folder with one safetensors file, or one folder, per version. SHARDCAST serves these files,
so they must not change."""
KEPT_WEIGHTS: Final = 8
"""Versions whose files are kept: more than SHARDCAST keeps, and more than may be pinned at a
time."""


class PolicyFiles:
    """The checkpoints and policies of an engine on disk."""

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
        """Make the files of ``engine``; ``adapters``: policies may travel as additions to
        policy 0."""
        self.durable = durable
        self.checkpoint = 0
        """Step of the newest checkpoint that this process knows."""
        self.covered = 0
        """Step of the previous checkpoint. All steps after it may have to be repeated."""
        self._engine = engine
        self._disk = disk
        self._base = base
        self._every = checkpoint_every
        self._sends_adapters = adapters

    def weights(self, step: int) -> str:
        """Return the path of the policy of ``step``: a file, or in a run with a base a
        folder."""
        return f"{WEIGHTS}/{step:08d}{'' if self._base else '.safetensors'}"

    def adapter(self, step: int) -> tuple[str, PolicyVersion] | None:
        """Return the path of the adapter that travels in place of the policy of ``step``, and
        the version that it adds to; None if adapters are not used."""
        return (
            (self.weights(step) + TRAVELS, PolicyVersion(0)) if self._sends_adapters else None
        )

    async def open(self) -> int:
        """Load the engine's checkpoint, or make the first policy. Returns the step."""
        self.checkpoint = await self._engine.open(CHECKPOINT, self._base)
        return self.checkpoint

    async def adopt(self, weights: str, step: int) -> None:
        """Load ``weights``, the policy of ``step``, into the engine with a fresh optimiser."""
        await self._engine.adopt(weights, step, self._base)

    async def keep(self, step: int, *, is_last: bool = False) -> None:
        """Write the policy of ``step``, and a checkpoint if it is time for one."""
        if step % self._every == 0 or is_last:
            await self.keep_checkpoint(step, self.weights(step))
        else:
            await self.durable.insist(partial(self._engine.save, "", self.weights(step)))

    async def keep_found(self, step: int, *, is_published: bool, is_signed: bool) -> None:
        """Write the files of ``step`` that are missing after a start.

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
        """Remove the policy that has become too old after a step."""
        old = self.weights(step - KEPT_WEIGHTS)
        is_base = self._sends_adapters and step == KEPT_WEIGHTS
        if step >= KEPT_WEIGHTS and not is_base:
            for path in (old, old + TRAVELS):
                await self.durable.insist(partial(self._disk.remove, path))
