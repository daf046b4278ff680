"""The signed run of a workload of whole nodes, and one such node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from p2p.node.config import NodeConfig
from p2p.node.node import Node, open_node
from roles.contract import Run, Terms, sign_run
from roles.contract.core.file import EnvironmentPin
from roles.contract.core.sampling import NO_SAMPLING
from roles.envs.base import environment_digest
from roles.rl.recipes import SORTING
from sim.kernel.keys import KeyRing
from sim.node.swarm import SimNode


def write_run(keys: KeyRing, name: str, trainer: str, validator: str, **terms: Any) -> Run:
    """Return a run that never expires, learns to sort with a fake engine, and has the nodes
    ``trainer`` and ``validator``. ``terms`` are those that differ."""
    common: dict[str, Any] = {
        "environments": (EnvironmentPin(name="sort", digest=environment_digest("sort")),),
        "trainers": (keys.signer(trainer).peer_id,),
        "validators": (keys.signer(validator).peer_id,),
        "model": replace(SORTING, engine="fake"),
        "sampling": NO_SAMPLING,
    }
    return sign_run(
        Terms(name=name, expiry=2**32 - 1, **(common | terms)), keys.signer("owner")
    )


@asynccontextmanager
async def open_member(machine: SimNode, config: NodeConfig, run: Run) -> AsyncIterator[Node]:
    """Run a whole node for the length of the block. The swarm's first node has the run file,
    and the others are given its address."""
    first = machine.siblings[0]
    where: dict[str, Any] = {"bootstrap": (first.addr,)}
    if machine is first:
        where = {"document": run.document}
    async with (
        machine.open_host() as host,
        open_node(machine.world, host, config, **where) as node,
    ):
        yield node
