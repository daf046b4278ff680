"""Worker processes of a machine that for a moment has no room for another.

A fork fails when the memory, the processes of the user or cgroup, or the open files of this
process are used up. Other programs give them back, mostly within seconds. Engines and
environments are started again after each death, at any time, and a node must not end for such a
moment; if it lasts, its operator has to raise a limit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

from p2p.errors import WorkerNotStarted
from p2p.sandbox import Confinement
from p2p.world import Worker, World

logger = logging.getLogger(__name__)

PAUSES: Final = (1.0, 2.0, 4.0, 8.0)
"""Seconds between five tries: a quarter of a minute, as long as for an engine whose process
always dies (`roles.engines.lasting`)."""


async def start_worker(
    world: World,
    argv: Sequence[str],
    *,
    name: str,
    stack: AsyncExitStack,
    confined: Confinement | None = None,
) -> Worker:
    """As `World.open_worker`, while ``stack`` is open. Raises `WorkerNotStarted` if the machine
    goes on to refuse."""
    for pause in PAUSES:
        try:
            return await stack.enter_async_context(
                world.open_worker(argv, name=name, confined=confined)
            )
        except WorkerNotStarted as error:
            logger.warning("%s; it is tried again in %g s", error, pause)
        await world.sleep(pause)
    return await stack.enter_async_context(
        world.open_worker(argv, name=name, confined=confined)
    )
