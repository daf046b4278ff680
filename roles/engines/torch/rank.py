"""One process among those that share a learner, and the sums over all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from p2p.errors import ConfigError
from roles.engines.config import EngineConfig
from roles.engines.torch.device import CPU, find_device
from roles.engines.torch.gradient import Tally

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LOOPBACK: Final = "lo0" if sys.platform == "darwin" else "lo"
"""Interface by which the processes of one machine find each other; other machines cannot use
it."""


@dataclass(frozen=True, slots=True)
class Rank:
    """This process, with number ``number`` of ``size``."""

    number: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """Device mesh of the processes; None where one process has all weights."""

    @property
    def is_first(self) -> bool:
        """True for the process that writes and answers."""
        return self.number == 0

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each number over all processes, all of which must call this."""
        if self.mesh is None:
            return list(values)
        import torch.distributed as dist

        numbers = torch.tensor(values, dtype=torch.float64, device=CPU)
        dist.all_reduce(numbers)
        return [float(one) for one in numbers]

    def total(self, tally: Tally) -> Tally:
        """Return the tally of all processes, all of which must call this."""
        if self.mesh is None:
            return tally
        import torch.distributed as dist

        tokens, loss, *sums = self.sums([tally.tokens, tally.loss, *tally.sums.values()])
        highest = torch.tensor([tally.ratio_max], dtype=torch.float64, device=CPU)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        named = dict(zip(tally.sums, sums, strict=True))
        return Tally(int(tokens), loss, float(highest), named)


ALONE: Final = Rank()


@contextmanager
def joined(
    config: EngineConfig, number: int, meeting: Path
) -> Iterator[tuple[torch.device, Rank]]:
    """Join the learner's processes as process ``number`` for the length of the block. They meet
    at the file ``meeting``; all must come."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    size, device = config.gpus.ranks, rank_device(config, number)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=number, world_size=size
    )
    try:
        yield device, Rank(number, size, init_device_mesh(device.type, (size,)))
    finally:
        dist.destroy_process_group()


def rank_device(config: EngineConfig, number: int) -> torch.device:
    """Return the device of process ``number``: GPUs in their order, or the CPU. Raises
    `ConfigError` if there are too few."""
    device, options = find_device(config.device), config.gpus
    if device.type == "mps":
        raise ConfigError("learner.ranks and learner.offload need CUDA: this machine has MPS")
    if device.type == "cpu":
        if options.offload:
            raise ConfigError(
                "learner.offload keeps a GPU's weights in the CPU's memory: this learner"
                " computes on the CPU, take it out"
            )
        return device
    return find_device(f"cuda:{number}" if options.ranks > 1 else str(device))
