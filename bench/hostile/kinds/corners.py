"""Hundreds of connections that exhaust sealed, decrypted, lingering or half-closed data."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable

import trio

from bench.hostile.kinds.registry import kind
from bench.hostile.raw import (
    ACK,
    DATA,
    FIN,
    FRAME,
    GO_AWAY,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    Attack,
    RawPeer,
    open_peer,
    pause,
)
from p2p.dht.record import PROTOCOL_ID as KAD
from p2p.gossip.messages import PROTOCOL_ID as MESHSUB
from p2p.membership.heartbeat import PROTOCOL_ID as HEARTBEAT
from p2p.multiaddr import Multiaddr
from p2p.node.rundoc import PROTOCOL_ID as RUN
from p2p.protobuf import field
from p2p.shardcast.manifest import PROTOCOL_ID as SHARDCAST
from p2p.swarm import identify
from p2p.transport.core import noise
from p2p.transport.core.negotiate import HEADER as MULTISTREAM, line
from p2p.transport.core.noise import NoiseHandshake, StaticKey
from p2p.wire import KI, MIB, encode_varint

PING_HELLO = line(MULTISTREAM) + line(identify.PING_ID)
LANES = (HEARTBEAT, KAD, MESHSUB, SHARDCAST)
GHOST = 2**31 + 1
"""Id of a stream that was never opened; its bytes are ignored."""


async def _each(
    attack: Attack, count: int, one: Callable[[RawPeer], Awaitable[None]], *, reads: bool = True
) -> None:
    """Open ``count`` connections of fresh identities, a few milliseconds apart, each of which
    does ``one``."""

    async def run(number: int) -> None:
        await pause(0.003 * number)
        async with open_peer(attack, source=attack.somewhere(number), reads=reads) as peer:
            await one(peer)

    await attack.crowd(count, run, retry=0.3)


async def _stay(peer: RawPeer) -> None:
    """Hold the connection; a peer that reads nothing does not see its end, and comes again
    later.
    """
    with trio.move_on_after(20):
        await peer.gone.wait()


@kind(
    "256 KiB of pings on each of 500 connections whose answers are not read: sealed, and not"
    " sent"
)
async def sealed_hoard(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        streams = [await peer.open(identify.PING_ID) for _ in range(4)]
        for _ in range(8):
            for stream in streams:
                await peer.data(stream, bytes(30_000))
        await _stay(peer)

    await _each(attack, 500, one, reads=False)


@kind(
    "pings until the node stops reading, before half a megabyte that it has decrypted already"
)
async def choked_hoard(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        for _ in range(20):
            # Whenever the node stops, it has read the half megabyte behind the pings as well.
            await peer.send(FRAME.pack(0, PING, SYN, 0, 1) * 5400)
            await peer.data(GHOST, bytes(1_700_000))
        await _stay(peer)

    await _each(attack, 100, one, reads=False)


@kind("32 KiB of control frames made wait on each of 700 connections")
async def control_hoard(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        for _ in range(8):
            await peer.send(FRAME.pack(0, PING, SYN, 0, 1) * 5000)
        await _stay(peer)

    await _each(attack, 700, one, reads=False)


@kind(
    "256 streams on each of 400 connections, answered by the node and never ended by the peer"
)
async def lingering_streams(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        for _ in range(8):
            frames = bytearray()
            for _ in range(32):
                body = line(MULTISTREAM) + line(identify.PROTOCOL_ID)
                frames += FRAME.pack(0, DATA, SYN, peer.next_id(), len(body)) + body
            await peer.send(bytes(frames))
            await pause(0.05)
        await _stay(peer)

    await _each(attack, 400, one)


@kind("streams of pings half-closed by the peer at once, thousands, their ends awaited")
async def half_closed(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        peer.credits = False
        while True:
            for _ in range(64):
                await peer.open(identify.PING_ID, bytes(2000), FIN)
            await pause(0.05)

    await _each(attack, 24, one)


@kind("identify answers of the largest size, told by 700 peers that stay")
async def fat_identities(attack: Attack) -> None:
    names = b"".join(
        field(3, f"/fat/{number:05}/".encode() + b"x" * 36) for number in range(120)
    )
    addrs = b"".join(
        field(2, Multiaddr.parse(f"/ip4/127.9.{number}.1/tcp/{4000 + number}").to_bytes())
        for number in range(16)
    )

    async def one(number: int) -> None:
        await pause(0.003 * number)
        info = addrs + names + field(6, b"agent" * 40)
        assert len(info) < 8 * KI
        async with open_peer(attack, source=attack.somewhere(number), info=info) as peer:
            await peer.open(identify.PING_ID, b"x")
            await _stay(peer)

    await attack.crowd(700, one, retry=0.5)


@kind("first Noise messages of every wrong length, and low-order points")
async def odd_noise(attack: Attack) -> None:
    head = line(MULTISTREAM) + line(noise.PROTOCOL_ID)
    points = (bytes(32), b"\x01" + bytes(31), b"\xff" * 32, b"\xed" + b"\xff" * 30 + b"\x7f")

    async def one(number: int) -> None:
        async with await attack.dial(attack.somewhere(number)) as stream:
            turn = attack.rng.randrange(6)
            if turn < 4:
                await stream.send_all(head + b"\x00\x20" + points[turn])
            else:
                size = attack.rng.choice((0, 1, 31, 33, 4095, 4097, 65535))
                await stream.send_all(
                    head + struct.pack(">H", size) + attack.rng.randbytes(min(size, 5000))
                )
            with trio.move_on_after(0.5):
                while await stream.receive_some(4096):
                    pass

    await attack.crowd(48, one, retry=0.0)


@kind("finished handshakes with a record cut in the middle, held open")
async def cut_records(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        sealed = peer._session.seal(bytes(65_000))
        await peer._stream.send_all(sealed[:60_000])
        await _stay(peer)

    await _each(attack, 400, one)


@kind("early data: a megabyte of frames behind the last handshake message")
async def early_data(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        body = bytearray()
        for _ in range(200):
            body += (
                FRAME.pack(0, DATA, SYN, peer.next_id(), len(PING_HELLO) + 4000)
                + PING_HELLO
                + bytes(4000)
            )
        await peer.send(bytes(body))
        await pause(0.05)

    await _each(attack, 32, one)


@kind("proposals of 4,000 protocols in each of 250 streams of a connection")
async def long_proposals(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        many = line(MULTISTREAM) + b"".join(line(f"/no/{number}") for number in range(4000))
        while True:
            stream = peer.next_id()
            await peer.data(stream, many[:50_000], SYN)
            await peer.frame(WINDOW_UPDATE, RST, stream, 0)

    await _each(attack, 8, one)


@kind("`ls` and empty lines in the negotiation of streams")
async def odd_negotiations(attack: Attack) -> None:
    bodies = (
        line("ls") * 500,
        b"\x00" * 3000,
        b"\x01\n" * 3000,
        line("na") * 500,
        line(MULTISTREAM) * 500,
    )

    async def one(peer: RawPeer) -> None:
        for turn in range(250):
            await peer.data(peer.next_id(), line(MULTISTREAM) + bodies[turn % 5], SYN)
        await pause(0.1)

    await _each(attack, 12, one)


@kind("negotiations of streams at a byte each 0.1 s, 256 on each of 40 connections")
async def slow_negotiations(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        streams = [peer.next_id() for _ in range(256)]
        flags = SYN
        for byte in PING_HELLO[:-1]:
            for stream in streams:
                await peer.data(stream, bytes((byte,)), flags)
            flags = 0
            await pause(0.1)
        await _stay(peer)

    await _each(attack, 40, one)


@kind("the same identity on hundreds of connections that all go on speaking")
async def one_identity_speaks(attack: Attack) -> None:
    key = attack.key()

    async def one(number: int) -> None:
        async with open_peer(attack, key=key, source=attack.somewhere(number)) as peer:
            while not peer.gone.is_set():
                await peer.open(identify.PROTOCOL_ID)
                await peer.open(identify.PING_ID, bytes(1000))
                await pause(0.01)

    await attack.crowd(100, one, retry=0.0)


@kind("window updates of the node's answers a byte at a time")
async def byte_windows(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        peer.credits = False
        streams = [await peer.open(identify.PING_ID) for _ in range(100)]
        for stream in streams:
            for _ in range(9):
                await peer.data(stream, bytes(29_000))
        while True:
            await peer.send(
                b"".join(
                    FRAME.pack(0, WINDOW_UPDATE, 0, stream, 1)
                    for stream in streams
                    for _ in range(5)
                )
            )

    await _each(attack, 6, one)


@kind("stream ids that leap: up, down, again, the node's own, zero")
async def leaping_ids(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        frames = bytearray()
        for _ in range(2000):
            stream = attack.rng.randrange(1, 2**32, 2)
            frames += FRAME.pack(0, DATA, SYN, stream, len(PING_HELLO)) + PING_HELLO
            frames += FRAME.pack(0, WINDOW_UPDATE, RST, stream, 0)
        await peer.send(bytes(frames))
        await peer.frame(DATA, SYN, attack.rng.choice((0, 2, 2**32 - 2)), 0)
        await pause(0.05)

    await _each(attack, 8, one)


@kind("all flags at once on streams that are open")
async def all_flags(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        for flags in range(256):
            stream = await peer.open(identify.PING_ID, b"abc")
            await peer.data(stream, b"x" * 10, flags & ~SYN)
            await peer.frame(WINDOW_UPDATE, flags & ~SYN, stream, 10)
        await pause(0.05)

    await _each(attack, 12, one)


@kind("a lane of messages opened again and again: the newest counts")
async def lanes_again(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            for protocol in LANES:
                await peer.open(protocol, encode_varint(1000) + bytes(200))
            await pause(0.002)

    await _each(attack, 16, one)


@kind("frames of no bytes on every lane, without end")
async def empty_messages(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        streams = [await peer.open(protocol) for protocol in LANES]
        while True:
            for stream in streams:
                await peer.data(stream, bytes(4000))

    await _each(attack, 8, one)


@kind("varints of ten bytes and lengths of 2^63 on every lane")
async def odd_lengths(attack: Attack) -> None:
    bodies = (
        b"\xff" * 9 + b"\x01",
        b"\x80" * 10,
        encode_varint(2**63 - 1),
        encode_varint(MIB + 1),
        b"\x80\x00",
    )

    async def one(peer: RawPeer) -> None:
        for body in bodies:
            for protocol in (*LANES, RUN, identify.PING_ID):
                await peer.open(protocol, body)
        await pause(0.1)

    await _each(attack, 16, one)


@kind("finished handshakes, one ping, then a reset of the socket: 64 at a time")
async def churn_with_reset(attack: Attack) -> None:
    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            stream = await peer.open(identify.PING_ID, b"y" * 32)
            with trio.move_on_after(1):
                await peer.reply(stream, 32)
            peer._stream.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )

    await attack.crowd(64, one, retry=0.0)


@kind("half-open sockets: the peer ends its direction after the handshake and reads on")
async def ends_its_direction(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        for _ in range(16):
            await peer.open(identify.PROTOCOL_ID)
        await peer._stream.send_eof()
        await _stay(peer)

    await _each(attack, 200, one)


@kind("pings on a thousand streams at once, each with one outstanding, answers read")
async def busy_pings(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        streams = [await peer.open(identify.PING_ID) for _ in range(250)]
        while True:
            await peer.send(
                b"".join(FRAME.pack(0, DATA, 0, stream, 1) + b"x" for stream in streams)
            )

    await _each(attack, 4, one)


@kind("second Noise messages answered by the first again, and third messages twice")
async def repeated_noise(attack: Attack) -> None:
    async def one(number: int) -> None:
        static = StaticKey.create(attack.key(), attack.rng.randbytes(32))
        handshake = NoiseHandshake(static, attack.rng.randbytes(32), initiator=True)
        first = handshake.data_to_send()
        async with await attack.dial(attack.somewhere(number)) as stream:
            await stream.send_all(line(MULTISTREAM) + line(noise.PROTOCOL_ID) + first)
            await stream.receive_some(4096)
            await stream.send_all(first * 50)
            with trio.move_on_after(0.5):
                while await stream.receive_some(4096):
                    pass

    await attack.crowd(32, one, retry=0.0)


@kind("SYN and FIN in one frame, without a protocol, without end")
async def syn_fin(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            frames = bytearray()
            for _ in range(500):
                frames += FRAME.pack(0, DATA, SYN | FIN, peer.next_id(), 0)
            await peer.send(bytes(frames))

    await _each(attack, 4, one)


@kind("a window's worth of bytes behind the end that the peer has said")
async def after_the_end(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        for _ in range(50):
            stream = await peer.open(identify.PING_ID, bytes(32), FIN)
            await peer.frame(WINDOW_UPDATE, FIN, stream, 0)
        await peer.data(stream, bytes(10_000))
        await pause(0.05)

    await _each(attack, 16, one)


@kind("GO_AWAY on four connections of each of 60 identities, which stay and are sent to")
async def gone_and_staying(attack: Attack) -> None:
    keys = [attack.key() for _ in range(60)]

    async def one(number: int) -> None:
        async with open_peer(
            attack, key=keys[number % 60], source=attack.somewhere(number)
        ) as peer:
            await peer.open(MESHSUB, b"\x00")
            await peer.frame(GO_AWAY, 0, 0, 0)
            for _ in range(100):
                await peer.frame(WINDOW_UPDATE, ACK, attack.rng.randrange(2, 100, 2), 1)
                await pause(0.02)

    await attack.crowd(240, one, retry=0.1)
