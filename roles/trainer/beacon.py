"""The trainer's beacon: pledges chains and reveals their links, one every few seconds.

The secret is on disk before its end is pledged, and so is how far it was revealed, so that a
trainer that is started again goes on with its chain and pledges nothing twice. A chain that is
lost, or at its end, is followed by one that began later.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from p2p.errors import StorageError
from p2p.node.node import Node
from roles.protocol.beacon import beacon_of
from roles.protocol.core.beacon import LINKS, Chain, Pledge, Reveal, beacon_topic
from roles.run import run_of
from roles.shared.checked_json import DamagedFile, discard, keep, recall
from roles.shared.durable import Durable

PATH: Final = "trainer/beacon"
SECRET_BYTES: Final = 32
"""As long as a link: nobody guesses either."""


class BeaconTeller:
    """Reveals links while the trainer works."""

    def __init__(self, node: Node, durable: Durable) -> None:
        self._node = node
        self._durable = durable
        self._heard = beacon_of(node)
        self._secret = b""
        self._chain: Chain | None = None
        self._pledge: Pledge | None = None
        self._number = 0
        """Of the newest link that was revealed."""

    async def tell_forever(self) -> None:
        """Reveal a link each period, until cancelled."""
        await self._recall()
        while True:
            if self._pledge is None or self._number >= LINKS:
                await self._begin()
            await self._reveal()
            await self._wait_period()

    async def _wait_period(self) -> None:
        await self._node.world.sleep(run_of(self._node).terms.lots.beacon)

    async def _recall(self) -> None:
        disk = self._node.world.disk
        known: Any = None
        try:
            known = await recall(disk, PATH)
        except DamagedFile as error:
            await discard(disk, PATH, error)
            await self._node.world.sleep(1.0)  # a second's chain is pledged once
        if known is not None:
            secret, began, self._number = known
            self._take_up(bytes.fromhex(secret), began)

    async def _begin(self) -> None:
        """A chain of its own second, later than all that were heard of."""
        began = max(int(self._node.world.wall()), self._heard.links.newest[0] + 1)
        self._number = 0
        self._take_up(self._node.world.entropy(SECRET_BYTES), began)
        await self._durable.insist(self._keep)

    def _take_up(self, secret: bytes, began: int) -> None:
        node, self._secret, self._chain = self._node, secret, Chain(secret)
        pledge = Pledge(node.run.id, node.peer_id, began, self._chain.end)
        self._pledge = pledge.signed(node.world.signer)

    async def _reveal(self) -> None:
        assert self._chain is not None
        assert self._pledge is not None
        self._number += 1
        reveal = Reveal(self._pledge, self._number, self._chain.link(self._number))
        self._heard.hear(reveal)
        self._node.gossip.publish(beacon_topic(self._node.run.id), reveal.to_bytes())
        with suppress(StorageError):  # after a crash the last few are revealed again
            await self._keep()

    async def _keep(self) -> None:
        assert self._pledge is not None
        value = [self._secret.hex(), self._pledge.chain, self._number]
        await keep(self._node.world.disk, PATH, value)
