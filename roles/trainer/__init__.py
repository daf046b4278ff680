"""The trainer: judges workers' submissions, learns from them, and publishes policies.

Read `session` first: one step after the other, and what is on disk in between. `desk` serves
workers and validators. All decisions are made by `core.gate` (the folder `core` does no I/O),
whose records `gate_files` keeps on the disk. Places that the scorer (`roles.protocol.scorer`)
accepts are `taken`: `inbox` keeps them on the disk, `intake` and `core.buffer` hold their
groups until a step takes them. `curve` records the rewards on held-out tasks, `metrics` a line
for each step; `account` counts what became of each node's work; `status` is the snapshot for
people, and `panels` are those of the dashboard; `policies` are the checkpoints and weights on
disk; `config` is the owner's table; `role` is the entry for a node, and `diloco` replaces it in
a run that trains by DiLoCo.

Data flow: window -> `desk` -> content -> scorer -> `core.gate` -> `inbox` (disk) ->
`core.buffer` -> the engine's step -> log, weights, now and then a checkpoint -> SHARDCAST
publishes the weights.
"""

from roles.trainer.config import TrainerConfig
from roles.trainer.role import Trainer

__all__ = ["Trainer", "TrainerConfig"]
