"""TRL's `AsyncGRPOTrainer` as the learner of a swarm (extra ``trl``).

It runs in a process of the researcher's own, beside a trainer node whose learner.toml says
``kind = "external"``, and talks to it by files of one folder: `roles.shared.exchange` has the
format, `run` reads and writes it (`SwarmRun`; any other trainer may use that alone, without TRL
and torch). `seams` has what TRL is given: `SwarmRollouts`, `SwarmWeights`, `SwarmCallback`, and
`ExactTrainer`, whose loader takes no sample before its step, and `arguments`. `cpu` mends what
keeps TRL 1.16 from a machine without GPUs. examples/trl has the script.

Nothing here imports trio, or what a node has.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

_HOMES: Final = {
    "SwarmRun": "run",
    "ExactTrainer": "seams",
    "SwarmCallback": "seams",
    "SwarmRollouts": "seams",
    "SwarmWeights": "seams",
    "arguments": "seams",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"roles.trl has no {name}")
    return getattr(import_module(f"roles.trl.{_HOMES[name]}"), name)
