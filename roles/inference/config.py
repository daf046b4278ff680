"""What a machine's owner says about its inference role; everything else is in the run file."""

from __future__ import annotations

from dataclasses import dataclass, field

from roles.engines.config import (
    AUTO,
    AUTO_THREADS,
    DeviceProfile,
    MachineLimits,
    VllmOptions,
    check_device,
    check_node_engine,
    check_threads,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceConfig:
    """This machine's part; everything else is in the run file."""

    engine: str = AUTO
    """What samples the policy on this machine: ``torch``, ``vllm`` (docs/running.md), or
    ``auto``: vLLM where it is installed and knows the model. The run decides what is computed,
    each node with what."""

    device: str = AUTO
    """What the engine computes on: ``auto`` (CUDA where torch sees a GPU, then MPS, then the
    CPU), ``cpu``, ``cuda``, ``cuda:1`` (...) or ``mps``."""

    threads: int = AUTO_THREADS
    """Threads of the engine; 0: all cores less one. Engines that share a machine want fewer:
    together no more than it has cores."""

    nice: int = 0
    """Niceness of the engine's process."""

    machine: MachineLimits = field(default_factory=MachineLimits)
    """What a run may ask of this machine, whichever run it is."""

    profile: DeviceProfile = field(default_factory=DeviceProfile)
    """Speeds of the fake engine; others ignore it."""

    vllm: VllmOptions = field(default_factory=VllmOptions)
    """Options of the vllm engine; others ignore it."""

    def __post_init__(self) -> None:
        check_node_engine(self.engine)
        check_device(self.device)
        check_threads(self.threads)
