"""The trainer: takes accepted rollouts from validators, learns, publishes policies.

Read `session` first: one step after the other, and what is on disk in between. What it learns
from comes in by `intake`, which answers each delivery of a validator once there is room:
`inbox` keeps it on disk, `check` computes anew all of it that the trainer can, `core.buffer`
holds its groups until a step takes them (the folder `core` is free of I/O). `curve` is what
people want to know of the learning, `metrics` a line for each step; `policies` are the
checkpoints and weights on disk; `config` is the owner's table; `role` is what a node opens.

How data flows: delivery -> `check` -> `inbox` (disk) -> receipt -> `core.buffer` -> the
engine's step -> log, weights, now and then a checkpoint -> SHARDCAST publishes the weights.
"""

from roles.trainer.config import TrainerConfig
from roles.trainer.role import Trainer

__all__ = ["Trainer", "TrainerConfig"]
