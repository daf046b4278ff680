"""Attacks behind the handshake: Yamux frames and streams."""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable

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
    WINDOW,
    WINDOW_UPDATE,
    Attack,
    RawPeer,
    open_peer,
    pause,
)
from p2p.dht.record import PROTOCOL_ID as KAD
from p2p.gossip.messages import PROTOCOL_ID as MESHSUB
from p2p.membership.heartbeat import PROTOCOL_ID as HEARTBEAT
from p2p.node.rundoc import PROTOCOL_ID as RUN
from p2p.shardcast.manifest import PROTOCOL_ID as SHARDCAST
from p2p.swarm import identify
from p2p.transport.core.negotiate import HEADER as MULTISTREAM, line
from p2p.wire import MIB, encode_varint

LANES = (HEARTBEAT, KAD, MESHSUB, SHARDCAST, RUN)
PING_HELLO = line(MULTISTREAM) + line(identify.PING_ID)
BATCH = 512
"""Frames of a flood that share a record: small frames alone would measure the attacker's own
cipher.
"""


async def _peers(
    attack: Attack, count: int, one: Callable[[RawPeer], Awaitable[None]], *, reads: bool = True
) -> None:
    """Open ``count`` connections of fresh identities from different addresses, each doing
    ``one``.
    """

    async def run(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number), reads=reads) as peer:
            await one(peer)

    await attack.crowd(count, run, retry=0.2)


@kind(
    "[SYN id, RST id, SYN id, hello] 250 times on each of 40 connections, which then come again"
)
async def syn_rst_syn(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        for _ in range(250):
            stream = peer.next_id()
            await peer.send(
                FRAME.pack(0, DATA, SYN, stream, 0)
                + FRAME.pack(0, DATA, RST, stream, 0)
                + FRAME.pack(0, DATA, SYN, stream, len(PING_HELLO))
                + PING_HELLO
            )
        attack.tally["streams"] += 250
        await pause(0.5)

    await _peers(attack, 40, one)


@kind("streams opened and reset at once, without end")
async def rapid_reset(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            frames = bytearray()
            for _ in range(BATCH):
                stream = peer.next_id()
                frames += FRAME.pack(0, DATA, SYN, stream, len(PING_HELLO)) + PING_HELLO
                frames += FRAME.pack(0, DATA, RST, stream, 0)
            attack.tally["streams"] += BATCH
            await peer.send(bytes(frames))

    await _peers(attack, 2, one)


@kind("256 streams on each of 36 connections, opened and left alone")
async def idle_streams(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        for _ in range(256):
            await peer.open(identify.PING_ID)
        attack.tally["streams"] += 256
        await peer.gone.wait()

    await _peers(attack, 36, one)


@kind("256 streams on each of 16 connections that never say a protocol")
async def nameless_streams(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        for _ in range(256):
            await peer.data(peer.next_id(), line(MULTISTREAM), SYN)
        await peer.gone.wait()

    await _peers(attack, 16, one)


@kind("streams beyond every limit, opened as fast as one process can")
async def stream_flood(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            frames = bytearray()
            for _ in range(BATCH):
                frames += FRAME.pack(0, WINDOW_UPDATE, SYN, peer.next_id(), 0)
            attack.tally["streams"] += BATCH
            await peer.send(bytes(frames))

    await _peers(attack, 2, one)


@kind("a stream's whole window in frames of one byte")
async def one_byte_frames(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        peer.credits = False
        for _ in range(64):
            stream = await peer.open(identify.PING_ID)
            single = FRAME.pack(0, DATA, 0, stream, 1) + b"x"
            for _ in range(WINDOW // 1024 - 1):
                await peer.send(single * 1024)
        await peer.gone.wait()

    await _peers(attack, 8, one)


@kind("frames without a byte in them")
async def empty_frames(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        stream = await peer.open(identify.PING_ID)
        while True:
            await peer.send(FRAME.pack(0, DATA, 0, stream, 0) * BATCH)

    await _peers(attack, 2, one)


@kind(
    "256 KiB unread in each of 256 streams of 16 connections: pings whose answers are not taken"
)
async def window_hoard(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        peer.credits = False
        for _ in range(256):
            stream = await peer.open(identify.PING_ID)
            for _ in range(WINDOW // 32768 - 1):
                await peer.data(stream, bytes(32768))
        await peer.gone.wait()

    await _peers(attack, 16, one)


@kind("more than the window allows")
async def window_overrun(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        peer.credits = False
        stream = await peer.open(identify.PING_ID)
        for _ in range(64):
            await peer.data(stream, bytes(60_000))

    await _peers(attack, 4, one)


@kind("a frame that announces 4 GiB")
async def huge_frame(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        stream = await peer.open(identify.PING_ID)
        await peer.send(FRAME.pack(0, DATA, 0, stream, 2**32 - 1) + bytes(16_000))
        await peer.gone.wait()

    await _peers(attack, 8, one)


@kind("Yamux pings without end, answers not read")
async def yamux_pings(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            await peer.send(FRAME.pack(0, PING, SYN, 0, 7) * BATCH)

    await _peers(attack, 2, one, reads=False)


@kind("Yamux pings without end, answers read")
async def yamux_pings_read(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            await peer.send(FRAME.pack(0, PING, SYN, 0, 7) * BATCH)

    await _peers(attack, 2, one)


@kind("answers to pings that the node never sent")
async def pongs_unasked(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            await peer.send(FRAME.pack(0, PING, ACK, 0, 7) * BATCH)

    await _peers(attack, 2, one)


@kind("/ipfs/ping without end on many streams")
async def ipfs_pings(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        streams = [await peer.open(identify.PING_ID) for _ in range(64)]
        while True:
            for stream in streams:
                await peer.data(stream, bytes(32))

    await _peers(attack, 4, one)


@kind("GO_AWAY again and again, while going on as before")
async def go_aways(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            await peer.send(FRAME.pack(0, GO_AWAY, 0, 0, 0) * BATCH)

    await _peers(attack, 4, one)


@kind("window updates without end, of 4 GiB each")
async def window_updates(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        stream = await peer.open(identify.PING_ID)
        while True:
            await peer.send(FRAME.pack(0, WINDOW_UPDATE, 0, stream, 2**32 - 1) * BATCH)

    await _peers(attack, 4, one)


@kind("window updates of nothing")
async def empty_window_updates(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        stream = await peer.open(identify.PING_ID)
        while True:
            await peer.send(FRAME.pack(0, WINDOW_UPDATE, 0, stream, 0) * BATCH)

    await _peers(attack, 2, one)


@kind("bytes on streams that do not exist")
async def unknown_streams(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            frames = bytearray()
            for _ in range(BATCH):
                frames += FRAME.pack(0, DATA, 0, peer.next_id(), 1) + b"x"
            await peer.send(bytes(frames))

    await _peers(attack, 4, one)


@kind("wrong versions, types, flags and ids")
async def bad_frames(attack: Attack) -> None:
    wrong = (
        FRAME.pack(9, DATA, 0, 1, 0),
        FRAME.pack(0, 200, 0, 1, 0),
        FRAME.pack(0, DATA, 0xFFFF, 1, 0),
        FRAME.pack(0, DATA, SYN, 2, 0),
        FRAME.pack(0, DATA, SYN, 0, 0),
        FRAME.pack(0, WINDOW_UPDATE, SYN | ACK | FIN | RST, 2**32 - 1, 0),
        FRAME.pack(0, PING, 0, 1, 0),
        FRAME.pack(0, GO_AWAY, SYN, 1, 99),
    )

    async def one(peer: RawPeer) -> None:
        await peer.send(attack.rng.choice(wrong))
        with_grace = 0.2
        await pause(with_grace)

    await _peers(attack, 8, one)


@kind("streams with the last ids there are")
async def last_ids(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        for stream in (2**32 - 5, 2**32 - 3, 2**32 - 1):
            await peer.data(stream, PING_HELLO + bytes(32), SYN)
        await pause(0.2)

    await _peers(attack, 8, one)


@kind("[RST of the node's stream][bad frame] while the node's writer is blocked")
async def reset_and_bad_frame(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        # The node's own streams to us have even ids; pings whose answers nobody takes fill its
        # socket.
        await peer.send(FRAME.pack(0, PING, SYN, 0, 1) * BATCH * 16)
        await pause(0.3)
        resets = b"".join(
            FRAME.pack(0, WINDOW_UPDATE, RST, stream, 0) for stream in range(2, 20, 2)
        )
        await peer.send(resets + FRAME.pack(9, 9, 9, 9, 9))
        await pause(0.3)

    await _peers(attack, 16, one, reads=False)


@kind("streams that are never ended, 255 at a time, beyond those the node may keep")
async def never_fin(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            for _ in range(64):
                await peer.open(identify.PROTOCOL_ID)
            await pause(0.05)

    await _peers(attack, 4, one)


@kind("500 connections that open eight streams of pings more every fifth of a second, idle all")
async def full_house(attack: Attack) -> None:
    async def one(number: int) -> None:
        await pause(0.002 * number)
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            while not peer.gone.is_set():
                for _ in range(8):
                    await peer.open(identify.PING_ID)
                attack.tally["streams"] += 8
                await pause(0.2)

    await attack.crowd(500, one, retry=0.3)


@kind("large answers asked for and not read: identify on every stream")
async def never_read(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            for _ in range(128):
                await peer.open(identify.PROTOCOL_ID, flags=FIN)
            await pause(0.01)

    await _peers(attack, 16, one, reads=False)


@kind(
    "bulk until the node reads in large pieces, then records full of new streams, again and"
    " again"
)
async def bulk_then_streams(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        while True:
            stream = await peer.open(identify.PING_ID)
            for _ in range(8):
                await peer.data(stream, bytes(30_000))
            await peer.frame(WINDOW_UPDATE, RST, stream, 0)
            frames = bytearray()
            for _ in range(800):
                stream = peer.next_id()
                frames += FRAME.pack(0, DATA, SYN, stream, len(PING_HELLO)) + PING_HELLO
                frames += FRAME.pack(0, DATA, RST, stream, 0)
            attack.tally["streams"] += 800
            await peer.send(bytes(frames))

    await _peers(attack, 8, one)


@kind("64 KiB at once in each of 250 echoes of 32 connections whose answers are not taken")
async def echo_hoard(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        peer.credits = False
        streams = [await peer.open(identify.PING_ID) for _ in range(250)]
        for _ in range(8):
            for stream in streams:
                await peer.data(stream, bytes(32_000))
        await peer.gone.wait()

    await _peers(attack, 32, one, reads=False)


@kind(
    "streams of every protocol at once, each with a first byte, on connections that come and go"
)
async def all_protocols(attack: Attack) -> None:
    names = (identify.PROTOCOL_ID, identify.PING_ID, *LANES)

    async def one(peer: RawPeer) -> None:
        for _ in range(20):
            for name in names:
                await peer.open(name, b"\x05")
        await pause(0.1)

    await _peers(attack, 24, one)


@kind("the node's own streams answered with every protocol's refusal, resets and ends by turns")
async def contrary_answers(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        answers = (line(MULTISTREAM) + line("na"), b"\x00", line("/other/1.0.0"), b"\xff" * 20)
        for turn in range(40):
            for stream in range(2, 40, 2):
                flags = (ACK, ACK | FIN, RST, 0)[(turn + stream // 2) % 4]
                await peer.data(stream, answers[turn % 4], flags)
            await pause(0.02)

    await _peers(attack, 16, one)


@kind("connections that send GO_AWAY first and streams afterwards, and vanish with a reset")
async def goodbye_first(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        await peer.frame(GO_AWAY, 0, 0, 0)
        for _ in range(64):
            await peer.open(identify.PROTOCOL_ID)
        peer._stream.socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )

    await _peers(attack, 16, one)


@kind("records of Noise that are forged")
async def forged_records(attack: Attack) -> None:
    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            await peer._stream.send_all(b"\x40\x00" + attack.rng.randbytes(0x4000))
            await peer.gone.wait()

    await attack.crowd(8, one)


@kind("records of Noise of one byte, and without any")
async def tiny_records(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        sealed = [peer._session.seal(b"" if number % 2 else b"\0") for number in range(1200)]
        await peer._stream.send_all(b"".join(sealed))
        await pause(0.05)

    await _peers(attack, 4, one)


@kind("negotiations of streams with lines without end")
async def stream_lines(attack: Attack) -> None:
    async def one(peer: RawPeer) -> None:
        for body in (
            b"\xff" * 12,
            encode_varint(MIB) + b"/",
            line(MULTISTREAM) + line("/no/1.0.0") * 200,
        ):
            await peer.data(peer.next_id(), body, SYN)
        await pause(0.1)

    await _peers(attack, 8, one)
