"""A peer that speaks Noise well and yamux as it likes, for attacks on connections and hosts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from p2p.identity import KeyPair, ProtocolId
from p2p.machine import RealWorld, open_world
from p2p.transport.connection import Connection, MuxedStream, secure
from p2p.transport.core.negotiate import line
from p2p.transport.core.noise import NoiseSession, StaticKey
from p2p.transport.core.yamux import DATA, HEADER, SYN, WINDOW_UPDATE
from p2p.transport.memory import MemoryNetwork
from tests.support.hosts import secure_pair

ECHO = ProtocolId("/test/echo")


def frame(kind: int, flags: int, stream_id: int, payload: bytes | int = b"") -> bytes:
    """A yamux frame; an int is the length of a frame without payload."""
    if isinstance(payload, int):
        return HEADER.pack(0, kind, flags, stream_id, payload)
    return HEADER.pack(0, kind, flags, stream_id, len(payload)) + payload


def hello(stream_id: int, protocol: str = ECHO) -> bytes:
    """A stream opened, and its protocol named."""
    proposal = line("/multistream/1.0.0") + line(protocol)
    return frame(WINDOW_UPDATE, SYN, stream_id, 0) + frame(DATA, 0, stream_id, proposal)


class Hostile:
    """The attacker's end of a secured connection."""

    def __init__(self, raw: trio.abc.HalfCloseableStream, session: NoiseSession) -> None:
        self.raw = raw
        self.session = session

    async def send(self, plaintext: bytes) -> None:
        """``plaintext`` in full records."""
        await self.raw.send_all(self.session.seal(plaintext))

    async def receive(self) -> bytes:
        """What came, opened, after at least one record."""
        opened: list[bytearray] = []
        while not opened:
            data = await self.raw.receive_some()
            if not data:
                return b""
            opened = self.session.receive_data(data)
        return b"".join(opened)

    async def swallow(self) -> None:
        """Read whatever comes until the end."""
        try:
            while await self.raw.receive_some():
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    @classmethod
    async def dial(
        cls, world: RealWorld, network: MemoryNetwork, addr: Any, key: KeyPair
    ) -> Hostile:
        """Shake hands with a whole host."""
        raw = await network.dial(addr)
        static = StaticKey.create(key, world.entropy(32))
        secured = await secure(raw, static, world.entropy, dialer=True)
        return cls(raw, secured.session)


class Victim:
    """A connection of ours, with a hostile peer at its other end."""

    def __init__(self, world: RealWorld, connection: Connection, hostile: Hostile) -> None:
        self.world = world
        self.connection = connection
        self.hostile = hostile
        self.accepted: list[MuxedStream] = []


@asynccontextmanager
async def open_victims(
    *keys: int,
    keepalive: float = float("inf"),
    on_stream: Callable[[MuxedStream], None] | None = None,
    **options: Any,
) -> AsyncIterator[list[Victim]]:
    """Connections of ours to hostile peers of ``keys``; ``options`` are `Connection`'s."""
    ours = KeyPair(b"\x01" * 32)
    async with open_world(key=ours) as world, trio.open_nursery() as nursery:
        victims: list[Victim] = []
        for key in keys:
            theirs, secured = await secure_pair(world, KeyPair(bytes([key]) * 32), ours)
            accepted: list[MuxedStream] = []
            if "budget" in options and callable(options["budget"]):
                options["budget"] = options["budget"](world)
            connection = Connection(
                world,
                secured,
                dialer=False,
                serves=ECHO.__eq__,
                on_stream=on_stream or accepted.append,
                keepalive=keepalive,
                **options,
            )
            victim = Victim(world, connection, Hostile(theirs.raw, theirs.session))
            victim.accepted = accepted
            victims.append(victim)
            nursery.start_soon(connection.run)
        yield victims
        nursery.cancel_scope.cancel()
