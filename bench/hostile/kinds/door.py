"""Attacks at the door: sockets, negotiations, handshakes, and many connections."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import trio

from bench.hostile.kinds.registry import kind
from bench.hostile.raw import Attack, open_peer, pause
from p2p.transport.core import noise
from p2p.transport.core.negotiate import HEADER as MULTISTREAM, line
from p2p.transport.core.noise import NoiseHandshake, StaticKey
from p2p.wire import encode_varint

FIRST_MESSAGE = 2 + 32
"""Bytes of the first Noise message: a length and a public key."""


async def _linger(stream: trio.SocketStream) -> None:
    """Hold a socket until the target closes it."""
    while await stream.receive_some(4096):
        pass


async def _hold(
    attack: Attack, count: int, first: Callable[[int], bytes], *, spread: bool = False
) -> None:
    async def one(number: int) -> None:
        async with await attack.dial(attack.somewhere(number) if spread else "") as stream:
            if greeting := first(number):
                await stream.send_all(greeting)
            await _linger(stream)

    await attack.crowd(count, one, retry=0.2)


@kind("nothing: what the measurement itself costs", honest=True)
async def quiet(attack: Attack) -> None:
    await trio.sleep_forever()


@kind("64 sockets that say nothing, opened again when they are closed")
async def silent_64(attack: Attack) -> None:
    await _hold(attack, 64, lambda _: b"")


@kind("1,000 sockets that say nothing")
async def silent_1000(attack: Attack) -> None:
    await _hold(attack, 1000, lambda _: b"")


@kind("500 sockets that say nothing, from 500 loopback addresses")
async def silent_from_everywhere(attack: Attack) -> None:
    await _hold(attack, 500, lambda _: b"", spread=True)


def _first_bytes(attack: Attack) -> bytes:
    static = StaticKey.create(attack.key(), attack.rng.randbytes(32))
    handshake = NoiseHandshake(static, attack.rng.randbytes(32), initiator=True)
    return line(MULTISTREAM) + line(noise.PROTOCOL_ID) + handshake.data_to_send()


@kind("200 handshakes that stop after the first Noise message")
async def half_handshakes(attack: Attack) -> None:
    await _hold(attack, 200, lambda _: _first_bytes(attack), spread=True)


@kind("200 handshakes at one byte a quarter second")
async def handshake_drip(attack: Attack) -> None:
    async def one(number: int) -> None:
        async with await attack.dial(attack.somewhere(number)) as stream:
            for byte in _first_bytes(attack):
                await stream.send_all(bytes((byte,)))
                await pause(0.25)
            await _linger(stream)

    await attack.crowd(200, one)


@kind("random bytes in place of a handshake")
async def garbage(attack: Attack) -> None:
    async def one(_: int) -> None:
        async with await attack.dial() as stream:
            await stream.send_all(attack.rng.randbytes(4096))
            await _linger(stream)

    await attack.crowd(20, one)


@kind("negotiation lines that never end, or announce gigabytes")
async def endless_lines(attack: Attack) -> None:
    starts = (b"\xff" * 16, encode_varint(2**30) + b"/", encode_varint(200) + b"/", b"\x80\x00")

    async def one(number: int) -> None:
        async with await attack.dial() as stream:
            await stream.send_all(starts[number % len(starts)])
            await _linger(stream)

    await attack.crowd(40, one)


@kind("proposals of protocols that the node does not speak, without end")
async def proposals(attack: Attack) -> None:
    async def one(_: int) -> None:
        async with await attack.dial() as stream:
            await stream.send_all(line(MULTISTREAM))
            while True:
                await stream.send_all(line("/nobody/1.0.0") * 100)
                await stream.receive_some(65536)

    await attack.crowd(20, one)


@kind("connections that are closed at once, as fast as one process makes them")
async def connect_and_close(attack: Attack) -> None:
    async def one(_: int) -> None:
        for _ in range(100):
            async with await attack.dial():
                pass

    await attack.crowd(8, one, retry=0.0)


@kind("connections that are reset at once")
async def connect_and_reset(attack: Attack) -> None:
    async def one(_: int) -> None:
        for _ in range(100):
            stream = await attack.dial()
            stream.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            await trio.aclose_forcefully(stream)

    await attack.crowd(8, one, retry=0.0)


@kind("whole handshakes with fresh keys, closed at once, as fast as one process makes them")
async def handshake_flood(attack: Attack) -> None:
    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number)):
            pass

    await attack.crowd(16, one, retry=0.0)


@kind("whole handshakes with fresh keys, closed at once, 400 at a time from one address")
async def handshake_crowd(attack: Attack) -> None:
    async def one(_: int) -> None:
        async with open_peer(attack):
            pass

    await attack.crowd(400, one, retry=0.0)


async def _say_and_close(attack: Attack, words: bytes) -> None:
    async def one(_: int) -> None:
        for _ in range(100):
            async with await attack.dial() as stream:
                await stream.send_all(words)

    await attack.crowd(64, one, retry=0.0)


@kind("connections that are closed behind the first line of their negotiation")
async def closed_after_a_line(attack: Attack) -> None:
    await _say_and_close(attack, line(MULTISTREAM))


@kind("connections that are closed behind their first Noise message")
async def closed_after_noise(attack: Attack) -> None:
    await _say_and_close(attack, _first_bytes(attack))


@kind("a third Noise message with a forged signature")
async def forged_hello(attack: Attack) -> None:
    async def one(_: int) -> None:
        static = StaticKey.create(attack.key(), attack.rng.randbytes(32))
        other = StaticKey.create(attack.key(), attack.rng.randbytes(32))
        forged = StaticKey(static.private, static.public, other.identity, other.peer_id)
        handshake = NoiseHandshake(forged, attack.rng.randbytes(32), initiator=True)
        async with await attack.dial() as stream:
            head = line(MULTISTREAM) + line(noise.PROTOCOL_ID)
            await stream.send_all(head + handshake.data_to_send())
            reply = b""
            while not handshake.session:
                data = bytes(await stream.receive_some(4096))
                if not data:
                    return
                reply += data
                if len(reply) > len(head):
                    handshake.receive_data(reply[len(head) :])
                    reply = head
            await stream.send_all(handshake.data_to_send())
            await _linger(stream)

    await attack.crowd(16, one)


async def _idle(attack: Attack, count: int, source: Callable[[int], str]) -> None:
    async def one(number: int) -> None:
        await pause(0.002 * number)
        async with open_peer(attack, source=source(number)) as peer:
            await peer.gone.wait()

    await attack.crowd(count, one, retry=0.5)


@kind("1,024 idle connections of as many identities, from one address")
async def idle_1024(attack: Attack) -> None:
    await _idle(attack, 1024, lambda _: "")


@kind("1,024 idle connections of as many identities, from as many loopback addresses")
async def idle_from_everywhere(attack: Attack) -> None:
    await _idle(attack, 1024, attack.somewhere)


@kind("1,008 idle connections on a node that may open 1,024 files", descriptors=1024)
async def no_descriptors_left(attack: Attack) -> None:
    await _idle(attack, 1008, attack.somewhere)


async def _one_identity(attack: Attack, count: int) -> None:
    key = attack.key()

    async def one(number: int) -> None:
        async with open_peer(attack, key=key, source=attack.somewhere(number)) as peer:
            await peer.gone.wait()

    await attack.crowd(count, one)


@kind("400 connections of one identity")
async def one_identity_400(attack: Attack) -> None:
    await _one_identity(attack, 400)


@kind("1,000 connections of one identity")
async def one_identity_1000(attack: Attack) -> None:
    await _one_identity(attack, 1000)


@kind("the same identity comes and goes, as fast as one process can")
async def one_identity_returns(attack: Attack) -> None:
    key = attack.key()

    async def one(_: int) -> None:
        async with open_peer(attack, key=key):
            pass

    await attack.crowd(8, one, retry=0.0)
