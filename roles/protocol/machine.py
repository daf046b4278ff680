"""Settings of a role that a machine's owner makes, and the opening of its engine and
environment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from p2p.node.node import Node
from roles.contract import Run
from roles.engines.base import Engine
from roles.engines.client import open_engine
from roles.engines.config import (
    AUTO,
    AUTO_THREADS,
    DeviceProfile,
    MachineLimits,
    VllmOptions,
    check_device,
    check_node_engine,
    check_threads,
    engine_of,
)
from roles.envs.client import ContainedEnvironment, open_environment_of
from roles.protocol.model_files import keep_model_files


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """Settings of this machine; everything else is in the run file."""

    device: str = AUTO
    """Device of the engine: ``auto`` (CUDA where torch sees a GPU, then MPS, then the CPU),
    ``cpu``, ``cuda``, ``cuda:1`` (...) or ``mps``."""

    threads: int = AUTO_THREADS
    """Threads of the engine; 0: all cores less one. Engines that share a machine should
    together have no more threads than it has cores."""

    nice: int = 0
    """Niceness of the engine's process."""

    machine: MachineLimits = field(default_factory=MachineLimits)
    """Limits of what any run may ask of this machine."""

    profile: DeviceProfile = field(default_factory=DeviceProfile)
    """Speeds of the fake engine; others ignore it."""

    def __post_init__(self) -> None:
        check_device(self.device)
        check_threads(self.threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerConfig(RoleConfig):
    """Settings of a role that draws completions or replays them."""

    engine: str = AUTO
    """Engine that runs the policy on this machine: ``torch``, ``vllm`` (docs/gpu.md), or
    ``auto``: vLLM where it is installed and knows the model. The run decides what is computed,
    and each node with which engine."""

    vllm: VllmOptions = field(default_factory=VllmOptions)
    """Options of the vllm engine; others ignore it."""

    def __post_init__(self) -> None:
        RoleConfig.__post_init__(self)
        check_node_engine(self.engine)


@asynccontextmanager
async def open_sampler(
    node: Node, run: Run, config: SamplerConfig, name: str
) -> AsyncIterator[tuple[ContainedEnvironment, Engine]]:
    """Open the run's environment and an engine for its policies, for the role of this name."""
    limits = config.machine
    engine_config = replace(
        engine_of(run, limits, threads=config.threads, nice=config.nice),
        device=config.device,
        profile=config.profile,
        vllm=config.vllm,
    ).computed_with(config.engine)
    folder = await keep_model_files(node, run)
    async with (
        open_environment_of(
            node.world,
            run,
            limits,
            folder,
            trusted=node.config.trust_environments,
            takes_capsules=node.config.accept_capsules,
        ) as environment,
        open_engine(node.world, engine_config, name=name, learns=False) as engine,
    ):
        yield environment, engine
