"""Unfinished frames, floods and bombs, and hostile messages of identify and gossip."""

from __future__ import annotations

from collections.abc import Callable

import msgpack
import trio

from bench.hostile.kinds.registry import kind
from bench.hostile.raw import Attack, RawPeer, open_peer, pause
from p2p.dht.record import PROTOCOL_ID as KAD
from p2p.gossip.messages import (
    PROTOCOL_ID as MESHSUB,
    PubsubMessage,
    Rpc,
    encode_rpc,
    sign_message,
)
from p2p.identity import KeyPair, ProtocolId
from p2p.membership.heartbeat import PROTOCOL_ID as HEARTBEAT
from p2p.multiaddr import Multiaddr
from p2p.node.policies import policy_topic
from p2p.node.rundoc import PROTOCOL_ID as RUN
from p2p.protobuf import field
from p2p.shardcast.manifest import PROTOCOL_ID as SHARDCAST
from p2p.shardcast.messages import BULK_PROTOCOL_ID as BULK, MAX_BULK
from p2p.swarm import identify
from p2p.wire import KI, MIB, encode_varint, frame

MESSAGES: tuple[ProtocolId, ...] = (HEARTBEAT, KAD, MESHSUB, SHARDCAST)


async def _strangers(attack: Attack, count: int, info: Callable[[KeyPair], bytes]) -> None:
    """Attack by strangers that come, identify themselves as ``info`` says, stay a moment and
    go.
    """

    async def one(number: int) -> None:
        key = attack.key()
        async with open_peer(attack, key=key, info=info(key), source=attack.somewhere(number)):
            await pause(0.3)

    await attack.crowd(count, one)


async def _writers(
    attack: Attack,
    count: int,
    protocol: str,
    payload: Callable[[RawPeer], bytes],
    *,
    rest: float = 0.0,
) -> None:
    """Attack by peers that write messages to ``protocol`` for as long as they may."""

    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            stream = await peer.open(protocol)
            while not peer.gone.is_set():
                body = payload(peer)
                for start in range(0, len(body), 60_000):
                    await peer.data(stream, body[start : start + 60_000])
                attack.tally["messages"] += 1
                await pause(rest)

    await attack.crowd(count, one)


# Unfinished.


async def _unfinished(
    attack: Attack, connections: int, protocols: tuple[str, ...], size: int
) -> None:
    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            for protocol in protocols:
                stream = await peer.open(protocol, encode_varint(size))
                left = size - 1
                while left and not peer.gone.is_set():
                    piece = min(left, 60_000, 250 * KI)
                    await peer.data(stream, bytes(piece))
                    left -= piece
                    if (size - left) % (240 * KI) < 60_000:
                        await pause(0.02)  # wait for the window to be given back
            await peer.gone.wait()

    await attack.crowd(connections, one, retry=0.3)


@kind("1 MiB frames less one byte, on every message protocol, on 64 connections")
async def unfinished_messages(attack: Attack) -> None:
    await _unfinished(attack, 64, MESSAGES, MIB)


@kind("1 MiB frames less one byte on 16 streams of the same protocol and connection")
async def unfinished_siblings(attack: Attack) -> None:
    await _unfinished(attack, 16, (MESHSUB,) * 16, MIB)


@kind("4 MiB bulk frames less one byte on 32 connections")
async def unfinished_bulk(attack: Attack) -> None:
    await _unfinished(attack, 32, (BULK,), MAX_BULK)


@kind("an RPC of nearly 1 MiB from each of 150 peers, which then stay and say nothing more")
async def last_messages(attack: Attack) -> None:
    unknown = field(100, bytes(MIB - 10))  # a field that nobody knows is passed over
    message = encode_varint(len(unknown)) + unknown

    async def one(number: int) -> None:
        await pause(0.03 * number)  # or too much is unfinished at a time, and given up
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            stream = await peer.open(MESHSUB)
            for start in range(0, len(message), 60_000):
                await peer.data(stream, message[start : start + 60_000])
                await pause(0.01)  # wait for the window to be given back
            attack.tally["messages"] += 1
            await peer.gone.wait()

    await attack.crowd(150, one, retry=0.3)


@kind("a frame at a byte a second")
async def dripped_frames(attack: Attack) -> None:
    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            streams = [
                await peer.open(each, encode_varint(10_000)) for each in (*MESSAGES, RUN, BULK)
            ]
            while not peer.gone.is_set():
                for stream in streams:
                    await peer.data(stream, b"x")
                await pause(1.0)

    await attack.crowd(64, one)


@kind("frames longer than any limit")
async def oversized_frames(attack: Attack) -> None:
    async def one(_: int) -> None:
        async with open_peer(attack) as peer:
            for protocol in (*MESSAGES, RUN, BULK):
                await peer.open(protocol, encode_varint(2**40) + bytes(1000))
            await pause(0.1)

    await attack.crowd(8, one)


# Identify.


@kind("identify with /p2p/<own id> as the only address")
async def identify_own_id(attack: Attack) -> None:
    def info(key: KeyPair) -> bytes:
        addr = Multiaddr((("p2p", str(key.peer_id)),)).to_bytes()
        return identify.encode_info(key.peer_id, MESSAGES, (), None) + field(2, addr)

    await _strangers(attack, 16, info)


@kind("identify with sixteen DNS names")
async def identify_dns(attack: Attack) -> None:
    def info(key: KeyPair) -> bytes:
        names = [f"{attack.rng.randbytes(8).hex()}.invalid" for _ in range(16)]
        addrs = [Multiaddr((("dns", name), ("tcp", "4001"))) for name in names]
        return identify.encode_info(key.peer_id, MESSAGES, addrs, None)

    await _strangers(attack, 32, info)


@kind("identify with the addresses of a third party: how often is it dialled?")
async def identify_victims(attack: Attack) -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.9.9.9")
    port = listeners[0].socket.getsockname()[1]

    async def count(_: trio.SocketStream) -> None:
        attack.tally["dials of the victim"] += 1

    def info(key: KeyPair) -> bytes:
        addrs = [
            Multiaddr.tcp("127.9.9.9", port),
            *(Multiaddr.tcp("192.0.2.1", n) for n in range(1, 8)),
        ]
        return identify.encode_info(key.peer_id, MESSAGES, addrs, None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, count, listeners)
        await _strangers(attack, 16, info)


@kind("identify with addresses at which no peer answers")
async def identify_silent(attack: Attack) -> None:
    def info(key: KeyPair) -> bytes:
        addrs = [
            Multiaddr.tcp(f"192.0.2.{1 + attack.rng.randrange(250)}", 4001) for _ in range(8)
        ]
        return identify.encode_info(key.peer_id, MESSAGES, addrs, None)

    await _strangers(attack, 64, info)


@kind("identify with garbage, too long, or with 128 long protocol names")
async def identify_garbage(attack: Attack) -> None:
    def info(key: KeyPair) -> bytes:
        names = [ProtocolId(f"/{attack.rng.randbytes(20).hex()}") for _ in range(128)]
        long = identify.encode_info(key.peer_id, names, (), None)
        return attack.rng.choice(
            (attack.rng.randbytes(2000), bytes(9000), long, b"\x12\x01\xff")
        )

    await _strangers(attack, 16, info)


@kind("250 fresh identities a second with made-up addresses")
async def identify_strangers(attack: Attack) -> None:
    def info(key: KeyPair) -> bytes:
        addrs = [Multiaddr.tcp(f"10.{attack.rng.randrange(250)}.1.1", 4001)]
        return identify.encode_info(key.peer_id, (), addrs, None)

    async def one(number: int) -> None:
        key = attack.key()
        async with open_peer(
            attack, key=key, info=info(key), source=attack.somewhere(number)
        ) as peer:
            with trio.move_on_after(0.2):
                while identify.PROTOCOL_ID not in peer.opened.values():
                    await pause(0.01)

    await attack.crowd(32, one, retry=0.0)


# Gossip.


@kind("empty RPCs at 100 KB/s")
async def empty_rpcs(attack: Attack) -> None:
    await _writers(attack, 1, MESHSUB, lambda _: b"\0" * 2048, rest=0.02)


@kind("empty RPCs as fast as one process writes them")
async def empty_rpcs_flood(attack: Attack) -> None:
    await _writers(attack, 2, MESHSUB, lambda _: b"\0" * 60_000)


@kind("1 MiB RPCs of the smallest control entries")
async def tiny_control(attack: Attack) -> None:
    entries = (
        field(1, b""),
        field(2, b""),
        field(3, field(1, "t")),
        field(4, b""),
        field(9, b""),
    )
    bodies = [frame(field(3, entry * ((MIB - 64) // len(entry)))) for entry in entries]
    await _writers(attack, 4, MESHSUB, lambda _: attack.rng.choice(bodies))


@kind("RPCs of many tiny fields, subscriptions and messages")
async def tiny_fields(attack: Attack) -> None:
    entries = (field(1, b""), field(2, b""), field(9, 1), field(1, field(2, "t")))
    bodies = [frame(entry * ((MIB - 64) // len(entry))) for entry in entries]
    await _writers(attack, 4, MESHSUB, lambda _: attack.rng.choice(bodies))


@kind("1,024 forged messages in each RPC")
async def forged_messages(attack: Attack) -> None:
    topic = policy_topic(attack.run_id)
    author = attack.key().peer_id.digest

    def body(_: RawPeer) -> bytes:
        messages = [
            PubsubMessage(
                author, attack.rng.randbytes(8), topic, b"lie", attack.rng.randbytes(64)
            )
            for _ in range(1024)
        ]
        return frame(encode_rpc(Rpc(messages=messages)))

    await _writers(attack, 4, MESHSUB, body)


@kind("signed messages of identities that no peer knows")
async def nobodies_messages(attack: Attack) -> None:
    topic = policy_topic(attack.run_id)

    def body(_: RawPeer) -> bytes:
        messages = [sign_message(attack.key(), topic, b"news", number) for number in range(256)]
        return frame(encode_rpc(Rpc(messages=messages)))

    await _writers(attack, 4, MESHSUB, body)


@kind("signed messages of 256 KiB on topics that no peer subscribes to")
async def large_messages(attack: Attack) -> None:
    def body(peer: RawPeer) -> bytes:
        message = sign_message(
            peer.key, "/nobody", bytes(255 * KI), attack.rng.randrange(2**40)
        )
        return frame(encode_rpc(Rpc(messages=[message] * 3)))

    await _writers(attack, 4, MESHSUB, body)


@kind("ids of messages that never come")
async def broken_promises(attack: Attack) -> None:
    topic = policy_topic(attack.run_id)

    def body(_: RawPeer) -> bytes:
        ids = [attack.rng.randbytes(46) for _ in range(4000)]
        return frame(encode_rpc(Rpc(subscriptions=[(topic, True)], ihave=[(topic, ids)])))

    await _writers(attack, 17, MESHSUB, body, rest=0.2)


@kind("requests for messages that do not exist, 5,000 a time")
async def wanted_ids(attack: Attack) -> None:
    def body(_: RawPeer) -> bytes:
        return frame(encode_rpc(Rpc(iwant=[attack.rng.randbytes(46) for _ in range(4900)])))

    await _writers(attack, 4, MESHSUB, body)


@kind("subscriptions, grafts and prunes by turns")
async def graft_flood(attack: Attack) -> None:
    topic = policy_topic(attack.run_id)
    topics = [f"/topic/{number}" for number in range(200)]
    rpcs = [
        Rpc(subscriptions=[(topic, True)], graft=[topic]),
        Rpc(prune=[(topic, 0)]),
        Rpc(graft=[topic] * 200),
        Rpc(subscriptions=[(each, True) for each in topics]),
        Rpc(subscriptions=[(each, False) for each in topics]),
    ]
    bodies = [frame(encode_rpc(rpc)) for rpc in rpcs]
    await _writers(attack, 8, MESHSUB, lambda _: attack.rng.choice(bodies))


@kind("peers that graft, leave RPCs behind and hang up")
async def ghosts(attack: Attack) -> None:
    topic = policy_topic(attack.run_id)
    body = frame(encode_rpc(Rpc(subscriptions=[(topic, True)], graft=[topic])))

    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number), reads=False) as peer:
            await peer.open(MESHSUB, body * 200)

    await attack.crowd(12, one)


# Msgpack.


def _bombs() -> list[bytes]:
    size = MIB - 64
    return [
        b"\xdd" + (size - 5).to_bytes(4, "big") + b"\x90" * (size - 5),  # a list of empty lists
        b"\xdd" + (size - 5).to_bytes(4, "big") + b"\xc0" * (size - 5),  # of nothings
        b"\xdf" + ((size - 5) // 3).to_bytes(4, "big") + b"\xa0\x90\x90" * ((size - 5) // 3),
        b"\x91" * 1000 + b"\x90",
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb([0] * (size // 2)),
    ]


async def _bomb(attack: Attack, protocol: str) -> None:
    bodies = [frame(bomb) for bomb in _bombs()]
    await _writers(attack, 4, protocol, lambda _: attack.rng.choice(bodies))


@kind("msgpack bombs to membership")
async def bombs_heartbeat(attack: Attack) -> None:
    await _bomb(attack, HEARTBEAT)


@kind("msgpack bombs to the DHT")
async def bombs_kad(attack: Attack) -> None:
    await _bomb(attack, KAD)


@kind("msgpack bombs to SHARDCAST")
async def bombs_shardcast(attack: Attack) -> None:
    await _bomb(attack, SHARDCAST)


@kind("msgpack bombs in bulk frames of 4 MiB")
async def bombs_bulk(attack: Attack) -> None:
    size = 4 * MIB - KI
    bomb = b"\x01\xdd" + (size - 6).to_bytes(4, "big") + b"\x90" * (size - 6)
    body = encode_varint(len(bomb)) + bomb
    await _writers(attack, 4, BULK, lambda _: body)


@kind("msgpack bombs in place of a request for the run document")
async def bombs_run(attack: Attack) -> None:
    bodies = [frame(b"\x91" * 63), frame(b"\xdc\x00\x3c" + b"\x90" * 60), frame(b"")]
    await _writers(attack, 4, RUN, lambda _: attack.rng.choice(bodies))


@kind("random bytes as messages of every protocol")
async def garbage_messages(attack: Attack) -> None:
    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            for protocol in (*MESSAGES, RUN, BULK):
                await peer.open(
                    protocol, frame(attack.rng.randbytes(attack.rng.randrange(1, 60)))
                )
            await pause(0.05)

    await attack.crowd(16, one)
