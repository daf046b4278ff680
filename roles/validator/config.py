"""What a machine's owner says about its validator; everything else is in the run file."""

from __future__ import annotations

from dataclasses import dataclass, field

from roles.engines.config import DeviceProfile, MachineLimits, VllmOptions, check_node_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatorConfig:
    """This machine's part; everything else is in the run file."""

    engine: str = "torch"
    """What replays the policy on this machine: ``torch``, or ``vllm`` (docs/running.md). The
    run decides what is computed, each node with what."""

    threads: int = 1
    """Threads of the engine."""

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
