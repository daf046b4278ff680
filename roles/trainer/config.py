"""What a machine's owner says about its trainer; how it learns is in ``learner.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roles.diloco.config import DilocoConfig
from roles.engines.config import (
    AUTO,
    AUTO_THREADS,
    Autocast,
    DeviceProfile,
    GpuOptions,
    MachineLimits,
    check_device,
    check_threads,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """This machine's part."""

    device: str = AUTO
    """What the engine computes on: ``auto`` (CUDA where torch sees a GPU, then MPS, then the
    CPU), ``cpu``, ``cuda``, ``cuda:1`` (...) or ``mps``."""

    threads: int = AUTO_THREADS
    """Threads of the engine; 0: all cores less one. Engines that share a machine want fewer:
    together no more than it has cores."""

    nice: int = 0
    """Niceness of the engine's process."""

    pool_steps: float = 1.5
    """Optimiser steps' worth of groups that may wait: more grows stale, less leaves the engine
    idle."""

    checkpoint_every: int = 1
    """Steps between checkpoints. One is 12 bytes a parameter: 1.3 MB in the demo, 1.6 GB (two
    generations of it) with 135 M parameters, where 10 is better: after a crash the trainer
    takes up to 10 steps again, of 3 s each."""

    autocast: Autocast = Autocast.AUTO
    """Whether the engine trains with bfloat16 products: ``auto``, ``on`` or ``off``."""

    machine: MachineLimits = field(default_factory=MachineLimits)
    """What a run may ask of this machine, whichever run it is."""

    profile: DeviceProfile = field(default_factory=DeviceProfile)
    """Speeds of the fake engine; others ignore it."""

    gpus: GpuOptions = field(default_factory=GpuOptions)
    """How the learner uses several GPUs, or one that is too small."""

    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    """Of runs that pre-train on text."""

    corpora: Mapping[str, str] = field(default_factory=dict)
    """Where this machine has the texts of such a run, by the names of its mixture."""

    def __post_init__(self) -> None:
        check_device(self.device)
        check_threads(self.threads)
        if self.pool_steps < 1:
            raise ValueError("pool_steps is at least 1, or no step ever has enough")
        if self.checkpoint_every < 1:
            raise ValueError("checkpoint_every is at least 1")
