"""The trainer: judges what workers bring, learns from it, publishes policies.

Read `session` first: one step after the other, and what is on disk in between. `desk` is where
workers and validators come to; all judgement is `core.gate`'s (the folder `core` is free of
I/O), whose records `gate_files` keeps on the disk. Places that the scorer
(`roles.protocol.scorer`) accepts are `taken`: `inbox` keeps them on the disk, `intake` and
`core.buffer` hold their groups until a step takes them. `curve` records how the learning goes,
`metrics` a line for each step; `account` are the books of what became of each node's work;
`status` is the snapshot for people, and `panels` is what the dashboard shows of it; `policies`
are the checkpoints and weights on disk; `config` is the owner's table; `role` is what a node
opens, and `diloco` what `role` opens in a run that trains by DiLoCo.

How data flows: window -> `desk` -> content -> scorer -> `core.gate` -> `inbox` (disk) ->
`core.buffer` -> the engine's step -> log, weights, now and then a checkpoint -> SHARDCAST
publishes the weights.
"""

from roles.trainer.config import TrainerConfig
from roles.trainer.role import Trainer

__all__ = ["Trainer", "TrainerConfig"]
