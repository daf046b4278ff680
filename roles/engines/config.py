"""Configuration of an engine: model shape, sampling, learner, environment, and machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from p2p.errors import ConfigError
from proofs.sampling import DrawRule
from roles.contract import Run
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.shape import Dtype, ModelShape
from roles.envs.base import EnvironmentLimits
from roles.rl.learner import LearnerConfig
from roles.rl.recipes import NETWORK, SORTER

GIB: Final = 1024**3
"""Bytes of a gibibyte."""
ROWS: Final = 256
"""Completions that an engine decodes together. In a CPU second, 64 rows draw 57,000 tokens, 128
draw 72,000, and 256 draw 99,000 (bench/README.md): below 64 dispatch dominates, above 256
nothing is gained."""
BATCH_TOKENS: Final = 1024
"""Positions that a learner, or a scorer, reads in one pass, padding included. A pass with
gradients keeps about 1.4 MB of activations a position in a model of 135 M parameters (half of
it in bfloat16), so 1.4 GB. More cost more memory and gain nothing: with 12 M parameters CPU to
that at 1,024 is 1.12 at 512, 1.07 at 2,048, 1.10 at 4,096; only the demo's 105,088 would like
4,096, for 0.88."""
CACHE_BYTES: Final = 2 * GIB
"""Keys and values of the completions that an engine decodes together, at their full length:
where `ROWS` of them would need more, fewer are decoded together. A model of 135 M parameters
has 46 kB a token in float32: 256 rows of 180 tokens, 44 of 1,024."""

AUTO: Final = "auto"
"""Name that stands for the best engine or device that the engine's process finds."""
NODE_ENGINES: Final = ("torch", "vllm")
"""Engines that really compute, unlike ``fake``. A machine's owner may also write `AUTO`."""
DEVICES: Final = re.compile(r"auto|cpu|cuda(:\d{1,2})?|mps")
"""Devices that a machine's owner may name."""
AUTO_THREADS: Final = 0
"""Number of threads that stands for all cores that the process may use less one, which is for
the node, but at least one."""
MAX_THREADS: Final = 1024
"""Most threads that may be set: more than any machine has cores."""
MAX_RANKS: Final = 64
"""Most ranks that may be set: more than one machine has GPUs."""


class Autocast(Enum):
    """Choice of whether a learner multiplies in bfloat16."""

    AUTO = "auto"
    """Train in bfloat16 if the model is large and the CPU or CUDA GPU has instructions for
    it."""
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits(EnvironmentLimits):
    """Limits that a machine's owner sets on the demands of any run."""

    memory: int = 16 * GIB
    """Bytes that an engine may need, by `memory_needed`: a 0.5 B model with 1,024 new tokens
    comes to 13 GB."""

    max_new_tokens: int = 32_768
    """Most tokens of one completion. Each is a pass through the model: at 30 a second this many
    take 18 minutes."""

    def __post_init__(self) -> None:
        if min(self.memory, self.max_new_tokens, self.environment_memory) < 1:
            raise ValueError("the limits of a machine are positive")

    def check(
        self,
        shape: ModelShape,
        sampling: SamplingTerms,
        context: int,
        min_memory: int = 0,
        learner: LearnerConfig | None = None,
    ) -> None:
        """Raise `ConfigError`, with the remedy, if a run of this kind exceeds them."""
        asked = {
            "memory": max(memory_needed(shape, sampling, context, learner), min_memory),
            "max_new_tokens": sampling.max_new_tokens,
        }
        for name, amount in asked.items():
            allowed = getattr(self, name)
            if amount > allowed:
                raise ConfigError(
                    f"this run asks for {name} = {amount:,}, this machine allows {allowed:,}:"
                    f" if you trust the run's owner and the machine can bear it, set {name} in"
                    " [role.NAME.machine]"
                )


_HEAD_TOKENS: Final = 512
"""Answer tokens that `roles.engines.torch.gradient` takes at a time."""


def memory_needed(
    shape: ModelShape,
    sampling: SamplingTerms,
    context: int,
    learner: LearnerConfig | None = None,
) -> int:
    """Return the bytes that the largest of the three jobs needs, within a factor of about two.

    A learner holds weights, gradients and two moments in float32, and the weights in bfloat16
    to say how many have changed; with `kl_reference` a frozen copy in float32; for the
    positions that it reads at once about 10 numbers for each feature of the residual stream and
    4 for each of SwiGLU, layer by layer; and four times the logits of a slice of answer tokens.
    (One completion longer than `BATCH_TOKENS` needs more.) A generator holds a cache of keys
    and values for `ROWS` completions at their full length, or for as many as `CACHE_BYTES`
    allow; for one it must be all of ``context``, since the run's owner writes the chat
    template, and with it prompts of any length. So with the cosines and sines of each position,
    of which there are twice as many as were needed.
    Example: the demo's 105,088 parameters come to 14 MB, SmolLM2's 135 M with a context of
    8,192 to 4.3 GB (measured in bfloat16: 4.1), a 0.5 B model with 1,024 new tokens to 13 GB;
    SmolLM2's with a context of a million, which nothing but this forbids, to 50 GB.
    """
    kept = shape.layers * (10 * shape.width + 4 * shape.feed_forward)
    logits = 4 * _HEAD_TOKENS * shape.vocabulary
    copy = 4 if learner is not None and learner.options.get("kl_reference") else 0
    # W and a bfloat16 copy of it are left of weights, gradients and moments
    each = 18 if learner is None or learner.lora is None else 8
    training = (each + copy) * shape.parameters + 4 * (BATCH_TOKENS * kept + logits)
    longest = sampling.max_new_tokens + sampling.heard
    answers = ROWS * longest * cache_bytes(shape, 4)
    cache = max(context * cache_bytes(shape, 4), min(answers, CACHE_BYTES))
    rotary = 2 * context * 2 * 4 * shape.head_width
    return max(training, 4 * shape.parameters + cache + rotary)


def cache_bytes(shape: ModelShape, number: int) -> int:
    """Return the bytes of the keys and values of one token; ``number`` is the bytes of each
    number."""
    return shape.layers * 2 * shape.key_heads * shape.head_width * number


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """Speeds of a simulated machine, and the size of its policy. Only the fake engine
    reads it."""

    generate_rate: float = 30_000.0
    """Sampled tokens per second, proofs included: the demo's engine on a core has 27,000 with
    64 rows, 39,000 with 128."""

    score_rate: float = 70_000.0
    """Replayed tokens per second. The demo's engine has 46,000 to 56,000 on a core."""

    step_seconds: float = 0.6
    """Seconds of one optimiser step: 0.36 CPU s in the demo, on a machine that does other
    things as well."""

    load_seconds: float = 0.01
    """Seconds to load or save a policy: 0.4 MB in the demo."""

    open_seconds: float = 8.0
    """Seconds of the warm-up of a learner without a checkpoint: 7 to 8 CPU s in the demo."""

    policy_bytes: int = 64 * 1024
    """Bytes of the weights, as bf16 noise: few, since a simulation moves every byte."""

    start_skill: float = 0.35
    """Probability of a right answer before the first step: about what the demo's warm-up
    leaves, 0.14 to 0.42."""

    learning: float = 0.04
    """Share of what is still wrong that one step repairs: with 0.04 a skill of 0.35 is 0.94
    after 60 steps (1 - 0.65 times 0.96^60)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """Options of vLLM that a machine's owner sets for all runs. Only the vllm engine
    reads it."""

    tensor_parallel: int = 1
    """Number of GPUs over which each weight is split, for models that one does not hold."""

    cache: int = GIB
    """Bytes for keys and values on each device: more lets more completions run side by side.
    Example: 135 M parameters take 46 KB a token in float32, so 1 GiB holds 23,000 tokens."""

    eager: bool = True
    """If True, the model runs as it is written. False compiles it and records CUDA graphs,
    which takes minutes at the start and is faster on a GPU."""

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.cache < 1:
            raise ValueError("tensor_parallel and cache are positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """GPU options of the learner that a machine's owner sets for all runs."""

    ranks: int = 1
    """Processes that share weights, gradients and moments by FSDP2: one for each GPU. On CPUs
    two only cost."""

    recompute: bool = False
    """If True, the activations of a block are dropped and computed again for the gradient: a
    third more arithmetic, and the memory of one block in place of all."""

    offload: bool = False
    """If True, weights, gradients and moments stay in the CPU's memory between their uses, for
    models that the GPUs do not hold."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"ranks are 1 to {MAX_RANKS}, the GPUs of one machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Configuration of one engine. Everything but the machine's own fields comes from the run
    file."""

    kind: str = "torch"
    """``torch`` and ``vllm`` compute, ``auto`` is one of them by what its process finds;
    ``fake`` pretends, in simulations."""

    environment: str | None = "sort"
    """Name of the environment that the first policy is taught by; None for a model with a
    base."""

    shape: ModelShape = SORTER
    """Architecture and sizes of the policy."""

    dtype: Dtype = Dtype.FLOAT32
    """Data type in which answers are sampled and scored."""

    draw: DrawRule = DrawRule.CDF
    """Rule by which a seed decides which token comes next."""

    context: int = 4096
    """Most tokens of a prompt and its completion together."""

    end_tokens: tuple[int, ...] = (0,)
    """Tokens that end a completion."""

    sampling: SamplingTerms = NETWORK.sampling
    """Sampling of answers in the run."""

    learner: LearnerConfig | None = None
    """Configuration of the trainer's learner; None at other nodes."""

    seed: int = 0
    """Seed of the initial weights and of the learner's random choices."""

    device: str = "cpu"
    """Device that computes: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` (...) or ``mps``."""

    threads: int = 1
    """Number of torch's threads; `AUTO_THREADS`: all cores less one. Five processes of one
    thread are twenty times as fast as five with torch's default."""

    nice: int = 0
    """Number added to the worker's niceness."""

    autocast: Autocast = Autocast.AUTO
    """Choice of whether the learner multiplies in bfloat16; its weights are float32 always. The
    machine chooses, not the run."""

    profile: DeviceProfile = field(default_factory=DeviceProfile)
    """Speeds of the fake engine; others ignore it."""

    vllm: VllmOptions = field(default_factory=VllmOptions)
    """Options of the vllm engine; others ignore it."""

    gpus: GpuOptions = field(default_factory=GpuOptions)
    """GPU options of the learner of the torch engine; others ignore it."""

    def computed_with(self, engine: str) -> EngineConfig:
        """Return this configuration with the engine that this machine's owner chose. A run with
        the fake engine keeps it."""
        return replace(self, kind=engine) if self.kind in NODE_ENGINES else self


def check_node_engine(name: str) -> None:
    """Raise `ValueError` unless a machine's owner may compute with the engine ``name``."""
    if name not in (AUTO, *NODE_ENGINES):
        known = " or ".join((AUTO, *NODE_ENGINES))
        raise ValueError(f"there is no engine {name!r:.40}: choose {known}")


def check_device(name: str) -> None:
    """Raise `ValueError` unless ``name`` is a valid device name, whether or not the device
    exists."""
    if not DEVICES.fullmatch(name):
        raise ValueError(
            f"there is no device {name!r:.40}: choose auto, cpu, cuda, cuda:N, mps"
        )


def check_threads(threads: int) -> None:
    """Raise `ValueError` unless ``threads`` is a valid number of threads or `AUTO_THREADS`."""
    if not 0 <= threads <= MAX_THREADS:
        raise ValueError(
            f"threads are 1 to {MAX_THREADS}, or {AUTO_THREADS}: all cores less one"
        )


def engine_of(
    run: Run,
    machine: MachineLimits | None = None,
    *,
    threads: int = 1,
    nice: int = 0,
    learner: LearnerConfig | None = None,
) -> EngineConfig:
    """Return the engine of ``run`` on this machine.

    Raises:
        ConfigError: The run asks for more than the machine's owner allows.
    """
    terms, model = run.terms, run.terms.model
    limits = machine or MachineLimits()
    limits.check(
        model.shape, terms.sampling, model.context, terms.admission.min_memory, learner
    )
    is_taught = not model.base and terms.environments
    return EngineConfig(
        kind=model.engine,
        environment=terms.environments[0].name if is_taught else None,
        shape=model.shape,
        dtype=model.dtype,
        draw=model.draw,
        context=model.context,
        end_tokens=model.end_tokens,
        sampling=terms.sampling,
        learner=learner,
        seed=model.seed,
        threads=threads,
        nice=nice,
    )
