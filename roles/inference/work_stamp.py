"""The work stamp of this node: made when the run asks for one, kept, and shown in heartbeats.

It takes from a blink to hours, as the run's owner likes, and is made once for each run and
identity. Meanwhile the role rests (`roles.protocol.standing`) and says so; a line now and then
says how far it is.
"""

from __future__ import annotations

import logging
from typing import Final

from p2p.dht.stamp import NONCE_BYTES, stamp_cost
from p2p.errors import StorageError
from p2p.node.admission import find_work
from p2p.node.node import Node
from p2p.node.wiring import shown_by
from roles.contract import run_of

WORK_PATH: Final = "work.stamp"
"""File in the node's folder with the nonce."""
TOLD_EVERY: Final = 15.0
"""Seconds between two progress lines."""

logger = logging.getLogger(__name__)


async def keep_stamped(node: Node) -> None:
    """Make and keep the stamp that the newest edition asks for. Works until cancelled."""
    book, disk = node.book, node.world.disk
    if await disk.size(WORK_PATH) is not None:
        book.show_work(await disk.read(WORK_PATH, 0, NONCE_BYTES))
    while True:
        while book.lacks_work(node.peer_id, shown_by(book, node.dht)):
            nonce = await _make(node, run_of(node).terms.admission.stamp_bits)
            try:
                await disk.replace(WORK_PATH, nonce)
            except StorageError as error:
                logger.warning("work_stamp not saved, to be made again: %s", error)
            book.show_work(nonce)
        node.membership.me.update(stamp=shown_by(book, node.dht))
        await book.wait_change()


async def _make(node: Node, bits: int) -> bytes:
    """Return the first nonce worth ``bits``, searched in pieces off the event loop."""
    world, run = node.world, node.run.id
    nonce, tries, told = b"", range(1 << 20), world.now()  # half a second's work
    while not nonce:
        cost = stamp_cost(bits, len(tries))
        nonce = await world.run_blocking(find_work, run, node.peer_id, bits, tries, cost=cost)
        tries = range(tries.stop, tries.stop + len(tries))
        if not nonce and world.now() - told >= TOLD_EVERY:
            told = world.now()
            logger.warning(
                "work stamp: %.0f%% of the tries that %d bits take on average; it may take"
                " several times as many",
                100 * tries.start / (1 << bits),
                bits,
            )
    return nonce
