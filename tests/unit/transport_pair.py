"""Two connections to each other in one process, for the tests of the driver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from p2p.identity import KeyPair, ProtocolId
from p2p.machine import RealWorld, open_world
from p2p.transport.connection import Connection, MuxedStream, Secured, secure
from p2p.transport.core.noise import StaticKey
from p2p.transport.memory import MemoryStream, memory_pair

ECHO = ProtocolId("/test/echo")
NOBODY = ProtocolId("/test/nobody")
ALICE, BOB = KeyPair(b"\x01" * 32), KeyPair(b"\x02" * 32)


@dataclass
class Pair:
    """Alice dialled Bob; Bob serves ECHO by putting streams into ``accepted``."""

    world: RealWorld
    alice: Connection
    bob: Connection
    raw: tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]
    accepted: list[MuxedStream] = field(default_factory=list)
    arrived: trio.Event = field(default_factory=trio.Event)

    async def stream_pair(self) -> tuple[MuxedStream, MuxedStream]:
        """A stream, and Bob's end of it."""
        self.arrived = trio.Event()
        ours = self.alice.open_stream(ECHO)
        await self.arrived.wait()
        return ours, self.accepted[-1]


async def secure_pair(
    world: RealWorld, one: trio.abc.HalfCloseableStream, other: trio.abc.HalfCloseableStream
) -> tuple[Secured, Secured]:
    """Shake hands as Alice and Bob."""
    done: dict[bool, Secured] = {}

    async def shake(raw: trio.abc.HalfCloseableStream, key: KeyPair, dialer: bool) -> None:
        static = StaticKey.create(key, world.entropy(32))
        expected = BOB.peer_id if dialer else None
        done[dialer] = await secure(
            raw, static, world.entropy, dialer=dialer, expected=expected
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(shake, one, ALICE, True)
        nursery.start_soon(shake, other, BOB, False)
    return done[True], done[False]


@asynccontextmanager
async def open_pair(
    keepalive: float = float("inf"),
    wrap: Callable[[MemoryStream], trio.abc.HalfCloseableStream] = lambda raw: raw,
) -> AsyncIterator[Pair]:
    """A pair for the length of the block; ``wrap`` makes something of its raw streams."""
    async with open_world(key=ALICE) as world, trio.open_nursery() as nursery:
        one, other = memory_pair()
        raw = wrap(one), wrap(other)
        secured = await secure_pair(world, *raw)

        def accept(stream: MuxedStream) -> None:
            pair.accepted.append(stream)
            pair.arrived.set()

        serves: Callable[[ProtocolId], bool] = ECHO.__eq__
        pair = Pair(
            world,
            Connection(
                world,
                secured[0],
                dialer=True,
                serves=serves,
                on_stream=accept,
                keepalive=keepalive,
            ),
            Connection(
                world,
                secured[1],
                dialer=False,
                serves=serves,
                on_stream=accept,
                keepalive=keepalive,
            ),
            raw,
        )
        nursery.start_soon(pair.alice.run)
        nursery.start_soon(pair.bob.run)
        yield pair
        nursery.cancel_scope.cancel()
