"""A service manager, which restarts a process whose disk has failed.

A process that cannot write what it must ends (`StorageError`), because it could not keep its
word any more: it neither answers from memory nor waits for room. Whatever else a process raises
ends the simulation.
"""

from __future__ import annotations

import logging
from typing import Final

from p2p.errors import StorageError
from sim.node.swarm import NodeMain, SimNode

logger = logging.getLogger(__name__)

RESTART_AFTER: Final = 5.0
"""Seconds until the process is started again: systemd's units often say so."""


async def supervise(node: SimNode, process: NodeMain) -> None:
    """Run ``process`` in the current life of ``node``, again and again as long as the disk ends
    it."""
    failed = True
    while failed:
        failed = False
        try:
            await process(node)
        except* StorageError as errors:
            logger.info("%s ended, for its disk: %s", node.name, errors.exceptions)
            failed = True
        node.world.sometimes("supervision/started a process again", failed)
        if failed:
            await node.world.sleep(RESTART_AFTER)
