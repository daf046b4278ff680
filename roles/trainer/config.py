"""Settings that a machine's owner makes for its trainer; ``learner.toml`` says how it
learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roles.diloco.config import DilocoConfig
from roles.engines.config import Autocast, GpuOptions
from roles.protocol.machine import RoleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(RoleConfig):
    """Settings of this machine's trainer."""

    pool_steps: float = 1.5
    """Groups that may wait, in optimiser steps' worth. With more, groups become stale; with
    fewer, the engine idles."""

    checkpoint_every: int = 1
    """Steps between checkpoints. One is 12 bytes a parameter: 1.3 MB in the demo, 1.6 GB (two
    generations of it) with 135 M parameters, where 10 is better: after a crash the trainer
    takes up to 10 steps again, of 3 s each."""

    keep_rollouts: float = 0.0
    """GiB of finished answers that stay on disk for ``shoal run export``, the newest. 0: what
    no step can need again is removed."""

    autocast: Autocast = Autocast.AUTO
    """Choice of whether the engine trains with bfloat16 products: ``auto``, ``on`` or
    ``off``."""

    gpus: GpuOptions = field(default_factory=GpuOptions)
    """Options by which the learner uses several GPUs, or one that is too small."""

    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    """Settings of this machine for runs that pre-train on text."""

    corpora: Mapping[str, str] = field(default_factory=dict)
    """Paths of the texts of such a run on this machine, by their names in its mixture."""

    def __post_init__(self) -> None:
        RoleConfig.__post_init__(self)
        if self.pool_steps < 1:
            raise ValueError("pool_steps is at least 1, or no step ever has enough")
        if not self.keep_rollouts >= 0:
            raise ValueError("keep_rollouts is a number of GiB, 0 or more")
        if self.checkpoint_every < 1:
            raise ValueError("checkpoint_every is at least 1")
