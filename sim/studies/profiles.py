"""Speed of machines: devices, model sizes, and what follows from both.

Device figures are the makers' own; model figures are the published configurations. Everything
else is an estimate from a roofline with three efficiencies, each named below with its reason,
and is given by functions, so that no rounded figure looks like a measurement:

- decoding reads all weights and the keys and values of every sequence once per step (memory
  bound), or multiplies two flops per parameter and sequence (compute bound), whichever takes
  longer;
- replaying a sequence in one prefill is compute bound: two flops per parameter and token;
- training takes six flops per parameter and token, and two more where the trainer recomputes
  log-probs.

Two published measurements that went into none of the efficiencies: Qwen3-8B in fp16 on two RTX
3090, one replica each, prompts of 4,096 tokens and answers of 1,024, gave 387 answer tokens a
second (forum post, May 2025); the roofline, which leaves out the prompts' prefill, gives 372.
Qwen3-32B in bf16 on one H100 with chat-sized requests gave 2,353 tokens a second, prompts
included (GPUStack's performance lab); the roofline gives 1,230 without them. A profile is good
to a factor of two, and conclusions must bear that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GB: Final = 1e9
"""Makers count in powers of ten."""

MEMORY_EFFICIENCY: Final = 0.6
"""Estimate: share of peak memory bandwidth that decoding reaches, launches and collectives
included."""
COMPUTE_EFFICIENCY: Final = 0.5
"""Estimate: share of peak dense bf16 that a large prefill reaches."""
TRAINING_EFFICIENCY: Final = 0.4
"""Model flops utilisation: 36.2 to 41.4 % was published for H100s (INTELLECT-1, arXiv
2412.01152)."""
USABLE_MEMORY: Final = 0.9
"""Share of a card that vLLM takes by default (``gpu_memory_utilization``)."""
MAX_SEQUENCES: Final = 256
"""The most sequences decoded together: vLLM's usual ``max_num_seqs``."""
DISK_RATE: Final = 2 * GB
"""Estimate: bytes per second from a solid state disk into the device, checksums included."""
BYTES_PER_WEIGHT: Final = 2
"""Bytes of a weight in bf16."""
TRAINING_FLOPS: Final = 6
"""Flops per parameter and token of forward and backward (Kaplan et al., arXiv 2001.08361)."""
PREFILL_FLOPS: Final = 2
"""Flops per parameter and token of a forward pass (same source)."""
TRAINING_BYTES: Final = 16
"""Bytes per parameter that training keeps: weights and gradients in bf16, master weights and
Adam's two moments in fp32 (ZeRO, arXiv 1910.02054). Activations come on top; checkpointing
keeps them small."""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator, or a CPU."""

    name: str
    memory: float
    """Memory in bytes."""
    bandwidth: float
    """Peak bytes per second of its memory."""
    flops: float
    """Peak dense bf16 with fp32 accumulation, per second."""
    source: str


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A dense decoder."""

    name: str
    parameters: float
    cache_per_token: int
    """Bytes of keys and values of one token in bf16: 4 x layers x key heads x head width."""
    source: str

    @property
    def weight_bytes(self) -> float:
        """Bytes of the policy in bf16."""
        return BYTES_PER_WEIGHT * self.parameters


DEVICES: Final = {
    "H100": Device("H100", 80 * GB, 3350 * GB, 989e12, "NVIDIA H100 data sheet, SXM"),
    "4090": Device("4090", 24 * GB, 1008 * GB, 165e12, "NVIDIA Ada architecture white paper"),
    "3090": Device("3090", 24 * GB, 936 * GB, 71e12, "NVIDIA GA102 architecture white paper"),
    "CPU": Device(
        "CPU",
        64 * GB,
        89.6 * GB,
        1.0e12,
        "estimate: two channels of DDR5-5600 (2 x 8 bytes x 5.6 GT/s); 8 cores x 4 GHz x 32"
        " flops (AVX2)",
    ),
}
"""Devices by name."""

MODELS: Final = {
    "1.5B": ModelSize("1.5B", 1.54e9, 4 * 28 * 2 * 128, "Qwen2.5-1.5B, config.json"),
    "8B": ModelSize("8B", 8.2e9, 4 * 36 * 8 * 128, "Qwen3-8B, config.json"),
    "32B": ModelSize(
        "32B", 32.5e9, 4 * 64 * 8 * 128, "Qwen2.5-32B (QwQ-32B has its shape), config.json"
    ),
}
"""Models by name."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Some equal devices that work on one model together."""

    device: Device
    count: int = 1

    def __str__(self) -> str:
        return f"{self.count}x{self.device.name}"

    @property
    def usable(self) -> float:
        """Bytes of memory, all devices together, that an engine may fill."""
        return USABLE_MEMORY * self.count * self.device.memory

    @property
    def flops(self) -> float:
        """Peak dense bf16 of all devices together, per second."""
        return self.count * self.device.flops

    def room(self, model: ModelSize) -> float:
        """Bytes left for keys and values; negative if the weights do not fit."""
        return self.usable - model.weight_bytes

    def sequences(self, model: ModelSize, context: float) -> int:
        """Return how many sequences of ``context`` tokens fit in memory together; 0 if the
        model does not fit."""
        return max(
            0, min(MAX_SEQUENCES, int(self.room(model) / (model.cache_per_token * context)))
        )

    def check_generates(self, model: ModelSize, context: float) -> None:
        """Check that the weights and one sequence of ``context`` tokens fit into memory.

        Raises:
            ValueError: They do not.
        """
        if not self.sequences(model, context):
            raise ValueError(
                f"{self} has {self.usable / GB:.1f} GB to use, and {model.name} needs"
                f" {model.weight_bytes / GB:.1f} GB for its weights and"
                f" {model.cache_per_token * context / GB:.1f} GB for each sequence of"
                f" {context:.0f} tokens"
            )

    def check_trains(self, model: ModelSize) -> None:
        """Check that weights, gradients and optimiser fit into memory.

        Raises:
            ValueError: They do not.
        """
        needed = TRAINING_BYTES * model.parameters
        if self.usable < needed:
            raise ValueError(
                f"{self} has {self.usable / GB:.1f} GB to use, and training {model.name} keeps "
                f"{needed / GB:.1f} GB"
            )

    def generate_rate(
        self, model: ModelSize, context: float, rows: int = MAX_SEQUENCES
    ) -> float:
        """Sampled tokens per second, all sequences together, at ``context`` tokens of mean
        length.

        ``rows`` is how many sequences there are to decode: fewer than fit leave the device
        idle.
        """
        batch = min(rows, self.sequences(model, context))
        read = model.weight_bytes + batch * context * model.cache_per_token
        by_memory = read / (self.count * self.device.bandwidth * MEMORY_EFFICIENCY)
        flops = PREFILL_FLOPS * model.parameters * batch
        by_compute = flops / (self.flops * COMPUTE_EFFICIENCY)
        return batch / max(by_memory, by_compute)

    def score_rate(self, model: ModelSize) -> float:
        """Return the tokens replayed per second."""
        return self.flops * COMPUTE_EFFICIENCY / (PREFILL_FLOPS * model.parameters)

    def step_seconds(self, model: ModelSize, tokens: float, *, recompute: bool = True) -> float:
        """Seconds to train on ``tokens`` once; ``recompute`` adds the pass for the old
        log-probs."""
        flops = (TRAINING_FLOPS + PREFILL_FLOPS * recompute) * model.parameters * tokens
        return flops / (self.flops * TRAINING_EFFICIENCY)

    def load_seconds(self, model: ModelSize) -> float:
        """Seconds to bring a policy from the disk into the devices."""
        return model.weight_bytes / DISK_RATE

    def engine_table(
        self,
        model: ModelSize,
        *,
        context: float,
        step_tokens: float,
        rows: int = MAX_SEQUENCES,
        scale: float = 1.0,
    ) -> dict[str, float]:
        """Fields of a role's ``DeviceProfile``, for the fake engine.

        ``rows`` is the size of a submission, which is decoded in one go; ``scale`` says how
        many tokens each token of the fake engine stands for.
        """
        return {
            "generate_rate": self.generate_rate(model, context, rows) / scale,
            "score_rate": self.score_rate(model) / scale,
            "step_seconds": self.step_seconds(model, step_tokens),
            "load_seconds": self.load_seconds(model),
            "open_seconds": self.load_seconds(model),
        }


def machine_named(name: str) -> Machine:
    """Return the machine with a name such as ``"4x3090"``.

    Raises:
        ValueError: The device is not listed.
    """
    count, _, device = name.rpartition("x")
    if device not in DEVICES or not (count or "1").isdecimal():
        raise ValueError(f"no machine is called {name!r}; devices are: {', '.join(DEVICES)}")
    return Machine(DEVICES[device], int(count or 1))
