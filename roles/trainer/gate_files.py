"""The gate's state on the trainer's disk: its secret, one file per name, and the time served.

To move a trainer to another machine, copy its folder: key, secret, standing and windows are in
it.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

import trio

from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.world import World
from roles.protocol.core.window import DIGEST_BYTES, content_digest
from roles.shared.checked_json import DamagedFile, discard, keep, recall
from roles.shared.durable import Durable
from roles.trainer.core.gate import Gate, Row

logger = logging.getLogger(__name__)

FOLDER: Final = "trainer/gate"
SECRET: Final = "trainer/gate-secret"
SERVED: Final = "trainer/gate-served"
TICK: Final = 1.0
"""Seconds between two checks of whether the desk serves. A process that was stopped for longer
has not served meanwhile."""
KEEP_EVERY: Final = 30
"""Ticks between two writes of the time served."""


class GateFiles:
    """Files of the gate's rows."""

    def __init__(self, world: World, durable: Durable) -> None:
        self._world = world
        self._durable = durable
        self._writing = trio.Lock()
        self.served = 0.0
        """Seconds in which the desk served and had room, including earlier processes."""

    async def open(self, me: PeerId) -> Gate:
        """Return the gate with the state that an earlier process left."""
        disk = self._world.disk
        gate = Gate(me, await self._secret())
        for name in await disk.list(FOLDER):
            path = f"{FOLDER}/{name}"
            try:
                kind, _, peer = name.partition("-")
                who = PeerId(bytes.fromhex(peer))
                gate.restore_untrusted(kind, who, _opened(await disk.read(path)))
            except (BadMessage, ValueError) as error:
                await discard(disk, path, error)
        try:
            self.served = float(await recall(disk, SERVED) or 0.0)
        except DamagedFile as error:
            await discard(disk, SERVED, error)
        return gate

    async def _secret(self) -> bytes:
        """Return the secret that keys the dice. A damaged secret is replaced; answers that were
        given stay as they are."""
        disk = self._world.disk
        if await disk.size(SECRET) is not None:
            try:
                return _opened(await disk.read(SECRET))
            except BadMessage as error:
                await discard(disk, SECRET, error)
        secret = self._world.entropy(32)
        await self._durable.insist(partial(disk.replace, SECRET, _sealed(secret)))
        return secret

    async def write(self, gate: Gate) -> None:
        """Write the rows that have changed. They are on disk when this returns."""
        async with self._writing:
            rows = gate.take_changed()
            try:
                while rows:
                    await self._write(rows[0])
                    rows.pop(0)
            finally:  # a peer that goes away must not take others' rows along
                gate.put_back(rows)

    async def _write(self, row: Row) -> None:
        disk, path = self._world.disk, f"{FOLDER}/{row.kind}-{row.peer.digest.hex()}"
        if row.data is None:
            await self._durable.insist(partial(disk.remove, path))
        else:
            await self._durable.insist(partial(disk.replace, path, _sealed(row.data)))

    async def note_served(self, seconds: float, ticks: int) -> None:
        """Add time served, and write the total now and then."""
        self.served += min(seconds, 2 * TICK)
        if ticks % KEEP_EVERY == 0:
            value = self.served
            await self._durable.insist(partial(keep, self._world.disk, SERVED, value))


def _sealed(data: bytes) -> bytes:
    return content_digest(data) + data


def _opened(sealed: bytes) -> bytes:
    data = sealed[DIGEST_BYTES:]
    if content_digest(data) != sealed[:DIGEST_BYTES]:
        raise BadMessage("it does not have the digest that it was written with")
    return data
