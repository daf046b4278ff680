"""The trainer: takes accepted rollouts from validators, learns, publishes policies.

Read `session` first: one step after the other, and what is on disk in between. `intake`
answers each delivery of a validator once there is room for it: `check` recomputes what the
trainer can, `audit` repeats what the validator did and refuses those that lie, `scoring` is the
engine that this takes, `inbox` keeps the delivery on disk, `core.buffer` holds its groups until
a step takes them (the folder `core` is free of I/O). `demand` tells the workers how much more
is wanted. `curve` records how the learning goes, for people, and `metrics` a line for each
step; `account` are the books of what became of each node's work, which nodes may ask about,
`status` is the snapshot for people, and `panels` is what the dashboard shows of it; `policies`
are the checkpoints and weights on disk; `config` is the owner's table; `role` is what a node
opens.

How data flows: delivery -> `check` and `audit` -> `inbox` (disk) -> receipt ->
`core.buffer` -> the engine's step -> log, weights, now and then a checkpoint -> SHARDCAST
publishes the weights.
"""

from roles.trainer.config import TrainerConfig
from roles.trainer.role import Trainer

__all__ = ["Trainer", "TrainerConfig"]
