"""A learner's weights over several processes, by FSDP2: how tensors get in and out.

Each process keeps some rows of every tensor (of weights, gradients and moments), gathers a
block's while it computes with it, and adds up its share of the gradients. Every process calls
the same methods in the same order. `put` works in each process alone, `whole` needs all
processes.

FSDP2 is imported when it is used: that takes as long as torch itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_PLAIN: Final = (Tensor, nn.Parameter)
"""Types of tensors that are not sharded."""


def shard(model: nn.Module, mesh: DeviceMesh, *, offload: bool) -> None:
    """Spread ``model`` over the processes of ``mesh``, block by block. At a time, one block is
    gathered, and the weights outside the blocks (embeddings, head)."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    blocks = model.get_submodule("model.layers").children()
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, offload_policy=policy)


def reshard(model: nn.Module) -> None:
    """Release gathered weights. Embeddings and head stay gathered after a pass without
    gradients, and would not change with the next step."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def put(target: Tensor, full: Tensor) -> None:
    """Write ``full``, which may be on any device, into ``target``; a shard takes its own
    rows."""
    mine = _as_shard(target)
    if mine is None:
        target.copy_(full)
        return
    rows = -(-len(full) // mine.device_mesh.size())  # as FSDP2 cuts, by `torch.chunk`
    start = rows * mine.device_mesh.get_local_rank()
    mine.to_local().copy_(full[start : start + rows])


def whole(tensor: Tensor) -> Tensor:
    """Return all rows, on every process; a tensor that is not sharded is returned itself."""
    mine = _as_shard(tensor)
    if mine is None:
        return tensor.detach()
    with torch.no_grad():
        return mine.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """Return this process's rows."""
    mine = _as_shard(tensor)
    return tensor if mine is None else mine.to_local()


def _as_shard(tensor: Tensor) -> DTensor | None:
    if type(tensor) in _PLAIN:
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None
