"""The configuration of an engine: model shape, recipe, environment, and the machine it runs on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from roles.rl.recipe import Recipe, WarmUp


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Qwen3-style decoder. The defaults are the demo's 105,088 parameters."""

    vocabulary: int = 50
    """Token ids are 0 to this, exclusive."""

    width: int = 64
    """Features of the residual stream."""

    layers: int = 2
    """Blocks of attention and SwiGLU."""

    query_heads: int = 4
    """Attention heads."""

    key_heads: int = 2
    """Heads of keys and values, each shared by query_heads / key_heads queries."""

    head_width: int = 16
    """Features per head; even, because of the rotary halves."""

    feed_forward: int = 192
    """Hidden features of SwiGLU."""

    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""

    epsilon: float = 1e-5
    """Of every RMSNorm."""

    def __post_init__(self) -> None:
        if self.query_heads % self.key_heads:
            raise ValueError(f"{self.query_heads} query heads cannot share {self.key_heads} key heads evenly")
        if self.head_width % 2:
            raise ValueError(f"head_width must be even, not {self.head_width}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """How fast a simulated machine computes, and how large its policy is. Only the fake engine reads it."""

    generate_rate: float = 30_000.0
    """Sampled tokens per second."""

    score_rate: float = 70_000.0
    """Replayed tokens per second."""

    step_seconds: float = 0.6
    """One optimiser step."""

    load_seconds: float = 0.01
    """Loading a policy, or saving one."""

    open_seconds: float = 8.0
    """Warm-up of a learner without a checkpoint."""

    policy_bytes: int = 64 * 1024
    """Size of the weights, as bf16 noise."""

    start_skill: float = 0.35
    """Probability of a right answer before the first step."""

    learning: float = 0.04
    """Share of what is still wrong that one step repairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine. Everything but the machine's own fields comes from the run file."""

    kind: str = "tiny"
    """``tiny`` computes; ``fake`` pretends, in simulations."""

    environment: str = "sort"
    """Name of the environment, for warm-up and evaluation."""

    shape: ModelShape = field(default_factory=ModelShape)
    """Of the policy."""

    recipe: Recipe = field(default_factory=Recipe)
    """Of the learner."""

    seed: int = 0
    """Of the initial weights and of the learner's random choices."""

    threads: int = 1
    """Threads of torch. Five processes of one thread beat five of the default by twenty to one."""

    nice: int = 0
    """Added to the worker's niceness."""

    profile: DeviceProfile = field(default_factory=DeviceProfile)
    """Of the fake engine."""


def config_to_wire(config: EngineConfig) -> dict[str, Any]:
    """As plain values, for the pipe to a worker."""
    return asdict(config)


def config_from_wire(value: dict[str, Any]) -> EngineConfig:
    """What `config_to_wire` made."""
    recipe = dict(value["recipe"])
    warm_up = recipe.pop("warm_up")
    return EngineConfig(
        **{
            **value,
            "shape": ModelShape(**value["shape"]),
            "recipe": Recipe(**_betas(recipe), warm_up=WarmUp(**_betas(warm_up))),
            "profile": DeviceProfile(**value["profile"]),
        }
    )


def _betas(value: dict[str, Any]) -> dict[str, Any]:
    """Lists come over the pipe where tuples went in."""
    first, second = value["betas"]
    return {**value, "betas": (first, second)}
