"""The swarm's services: heartbeats, the DHT, SHARDCAST, the run document, and an honest peer
that pauses.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count

from bench.hostile.kinds.registry import kind
from bench.hostile.raw import Attack, RawPeer, minted, open_peer, pause, stamp_of
from p2p.dht.messages import Contact, FindNode, FindValue, Ping, Pong, Store, encode
from p2p.dht.record import PROTOCOL_ID as KAD, Record, encode_addrs, record_key, sign_record
from p2p.identity import KeyPair, PeerId
from p2p.membership.heartbeat import PROTOCOL_ID as HEARTBEAT, Digest, SignedHeartbeat
from p2p.membership.messages import (
    Beat,
    Disconnect,
    ForwardJoin,
    Heartbeats,
    Join,
    Message,
    Neighbor,
    Newcomers,
    Suspect,
    Want,
    encode_message,
)
from p2p.multiaddr import Multiaddr
from p2p.node.rundoc import PROTOCOL_ID as RUN
from p2p.shardcast import messages as shardcast
from p2p.shardcast.manifest import PROTOCOL_ID as SHARDCAST
from p2p.swarm import identify
from p2p.wire import frame, pack
from sim.workloads.hostile.heartbeats import say_alive

_numbers = count(int(time.time() * 1000))  # noqa: TID251 - heartbeats carry the wall's milliseconds
_stamps: dict[PeerId, bytes] = {}
SILENT = Multiaddr.tcp("192.0.2.1", 4001)
"""Address reserved for documentation, where nothing answers."""


def _alive(attack: Attack, key: KeyPair, interval: float = 5.0) -> SignedHeartbeat:
    wall = time.time()  # noqa: TID251 - an attacker is no node
    stamp = _stamps.get(key.peer_id, b"")
    return say_alive(
        key,
        next(_numbers),
        wall,
        interval=interval,
        addrs=(SILENT,),
        run=attack.run_id,
        stamp=stamp,
    )


async def _members(
    attack: Attack,
    members: int,
    messages: Callable[[RawPeer, int], list[Message]],
    *,
    rest: float = 0.0,
) -> None:
    """Attack by members that have paid for a stamp and then send what ``messages`` makes."""
    keys = [minted(number) for number in range(members)]
    _stamps.update({key.peer_id: stamp_of(key.peer_id) for key in keys})

    async def one(number: int) -> None:
        async with open_peer(attack, key=keys[number], source=attack.somewhere(number)) as peer:
            stream = await peer.open(HEARTBEAT)
            turn = 0
            while not peer.gone.is_set():
                body = b"".join(
                    frame(encode_message(message)) for message in messages(peer, turn)
                )
                for start in range(0, len(body), 60_000):
                    await peer.data(stream, body[start : start + 60_000])
                turn += 1
                attack.tally["messages"] += 1
                await pause(rest)

    await attack.crowd(members, one)


# Membership.


@kind("heartbeats of one's own, each newer than the last, without end")
async def heartbeat_flood(attack: Attack) -> None:
    await _members(
        attack, 4, lambda peer, _: [Beat(True, _alive(attack, peer.key))] * 16, rest=0.001
    )


@kind("heartbeats of hundreds of identities that do not exist")
async def invented_members(attack: Attack) -> None:
    def say(peer: RawPeer, turn: int) -> list[Message]:
        if not turn:
            return [Beat(True, _alive(attack, peer.key))]
        return [Heartbeats(tuple(_alive(attack, attack.key()) for _ in range(32)))]

    await _members(attack, 4, say, rest=0.02)


@kind("newcomers that are forwarded for a walk, without end")
async def invented_newcomers(attack: Attack) -> None:
    await _members(
        attack, 4, lambda *_: [ForwardJoin(8, _alive(attack, attack.key()))] * 8, rest=0.01
    )


@kind("urgent requests to be a neighbour, from 32 members")
async def urgent_links(attack: Attack) -> None:
    await _members(
        attack, 32, lambda peer, _: [Neighbor(True, _alive(attack, peer.key))], rest=0.2
    )


@kind("joins and departures of 32 members by turns")
async def join_and_leave(attack: Attack) -> None:
    await _members(
        attack, 32, lambda peer, _: [Join(_alive(attack, peer.key)), Disconnect()], rest=0.05
    )


@kind("accusations of members that do not exist, with their own last words")
async def accusations(attack: Attack) -> None:
    victims = [attack.key() for _ in range(256)]

    def say(peer: RawPeer, turn: int) -> list[Message]:
        if not turn:
            return [Beat(True, _alive(attack, peer.key))]
        chosen = attack.rng.sample(victims, 32)
        return [Suspect(tuple(_alive(attack, each) for each in chosen))]

    await _members(attack, 4, say, rest=0.02)


@kind("members with an interval of 0.05 s, accused as often")
async def hasty_members(attack: Attack) -> None:
    def say(peer: RawPeer, _: int) -> list[Message]:
        signed = _alive(attack, peer.key, 0.05)
        return [Beat(True, signed), Suspect((signed,))]

    await _members(attack, 8, say, rest=0.05)


@kind("digests of what does not exist, and requests for it")
async def digest_flood(attack: Attack) -> None:
    def say(peer: RawPeer, _: int) -> list[Message]:
        keys = tuple(attack.rng.randbytes(8) for _ in range(64))
        digests = tuple(Digest(attack.rng.randbytes(8), 2**40, 1) for _ in range(200))
        return [Beat(True, _alive(attack, peer.key)), Newcomers(digests), Want(keys)]

    await _members(attack, 4, say, rest=0.005)


# The DHT.


def _contact(key: KeyPair, *addrs: Multiaddr) -> Contact:
    return Contact(key.peer_id, stamp_of(key.peer_id), addrs)


async def _askers(
    attack: Attack,
    askers: int,
    say: Callable[[RawPeer, Contact, int], list[bytes]],
    *,
    rest: float = 0.0,
    reads: bool = True,
) -> None:
    keys = [minted(number) for number in range(askers)]
    contacts = [_contact(key, SILENT) for key in keys]

    async def one(number: int) -> None:
        source = attack.somewhere(number)
        async with open_peer(attack, key=keys[number], source=source, reads=reads) as peer:
            stream, turn = await peer.open(KAD), 0
            while not peer.gone.is_set():
                body = b"".join(map(frame, say(peer, contacts[number], turn)))
                for start in range(0, len(body), 60_000):
                    await peer.data(stream, body[start : start + 60_000])
                turn += 1
                attack.tally["messages"] += 1
                await pause(rest)

    await attack.crowd(askers, one)


@kind("FIND_VALUE of the run's key, without end")
async def find_value_flood(attack: Attack) -> None:
    key = record_key("run", attack.run_id, 0)

    def say(_: RawPeer, contact: Contact, turn: int) -> list[bytes]:
        return [encode(turn * 64 + n, contact, FindValue(key)) for n in range(64)]

    await _askers(attack, 2, say, rest=0.01)


@kind("questions to the DHT of 32 identities that read no answer")
async def dht_answers_unread(attack: Attack) -> None:
    key = record_key("run", attack.run_id, 0)

    def say(_: RawPeer, contact: Contact, turn: int) -> list[bytes]:
        return [encode(turn * 32 + n, contact, FindValue(key)) for n in range(32)]

    await _askers(attack, 32, say, rest=0.02, reads=False)


@kind("FIND_NODE of random targets, without end")
async def find_node_flood(attack: Attack) -> None:
    def say(_: RawPeer, contact: Contact, turn: int) -> list[bytes]:
        return [
            encode(turn * 64 + n, contact, FindNode(attack.rng.randbytes(20)))
            for n in range(64)
        ]

    await _askers(attack, 2, say, rest=0.01)


@kind("records of one's own under random names, without end")
async def store_flood(attack: Attack) -> None:
    def say(peer: RawPeer, contact: Contact, turn: int) -> list[bytes]:
        said = []
        for number in range(16):
            name = attack.rng.randbytes(32)
            expires = int(time.time()) + 3000  # noqa: TID251 - an attacker is no node
            unsigned = Record(
                "junk",
                name,
                peer.key.peer_id,
                contact.nonce,
                next(_numbers),
                expires,
                bytes(1000),
                bytes(64),
            )
            store = Store(record_key("junk", name, 0), sign_record(unsigned, peer.key).encode())
            said.append(encode(turn * 16 + number, contact, store))
        return said

    await _askers(attack, 2, say, rest=0.01)


@kind("records with forged signatures")
async def forged_records_dht(attack: Attack) -> None:
    def say(peer: RawPeer, contact: Contact, turn: int) -> list[bytes]:
        name = peer.key.peer_id.digest
        expires = int(time.time()) + 3000  # noqa: TID251 - an attacker is no node
        value = encode_addrs((SILENT,))
        record = Record(
            "addr",
            name,
            peer.key.peer_id,
            contact.nonce,
            next(_numbers),
            expires,
            value,
            bytes(64),
        )
        store = Store(record_key("addr", name, 0), record.encode())
        return [encode(turn * 16 + number, contact, store) for number in range(16)]

    await _askers(attack, 2, say, rest=0.01)


@kind("answers that the node never asked for")
async def pongs(attack: Attack) -> None:
    def say(_: RawPeer, contact: Contact, turn: int) -> list[bytes]:
        return [encode(attack.rng.randrange(2**32), contact, Pong()) for _ in range(64)]

    await _askers(attack, 2, say, rest=0.005)


@kind("pings without end, from identities without a stamp")
async def unstamped_pings(attack: Attack) -> None:
    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            contact = Contact(peer.key.peer_id, bytes(8), (SILENT,))
            stream = await peer.open(KAD)
            while not peer.gone.is_set():
                body = b"".join(frame(encode(n, contact, Ping())) for n in range(256))
                await peer.data(stream, body)
                await pause(0.005)

    await attack.crowd(8, one)


# SHARDCAST, the run document.


@kind("questions about policies that do not exist")
async def shardcast_asks(attack: Attack) -> None:
    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            stream = await peer.open(SHARDCAST)
            while not peer.gone.is_set():
                asks: list[shardcast.Message] = [shardcast.Hello(-1)]
                asks += [shardcast.Ask(attack.rng.randbytes(32), True) for _ in range(200)]
                await peer.data(
                    stream, b"".join(frame(shardcast.encode_message(ask)) for ask in asks)
                )
                await pause(0.005)

    await attack.crowd(4, one)


@kind("possessions of policies that do not exist")
async def shardcast_haves(attack: Attack) -> None:
    pairs = tuple((2 * number, 1) for number in range(1000))

    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            stream = await peer.open(SHARDCAST)
            while not peer.gone.is_set():
                have = shardcast.Have(attack.rng.randbytes(32), pairs)
                await peer.data(stream, frame(shardcast.encode_message(have)) * 8)
                await pause(0.005)

    await attack.crowd(4, one)


@kind("requests for the run document, answers read")
async def run_requests(attack: Attack) -> None:
    ask = frame(pack([b"", 0]))

    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number)) as peer:
            stream = await peer.open(RUN)
            while not peer.gone.is_set():
                await peer.data(stream, ask * 100)
                await pause(0.01)

    await attack.crowd(4, one)


@kind("requests for the run document on 255 streams of 16 connections, answers not read")
async def run_requests_unread(attack: Attack) -> None:
    ask = frame(pack([b"", 0]))

    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number), reads=False) as peer:
            for _ in range(255):
                await peer.open(RUN, ask * 1000)
            await pause(60)

    await attack.crowd(16, one)


# Honest, and blamed.


def _start_honest(attack: Attack, folder: str) -> subprocess.Popen[bytes]:
    addr = f"/ip4/{attack.target.host}/tcp/{attack.target.port}/p2p/{attack.target.peer}"
    command = [
        "p2p.node",
        "--data",
        folder,
        "--bootstrap",
        addr,
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=attack.tree,
        env=os.environ | {"PYTHONPATH": attack.tree},
    )


@kind(
    "an honest node that stops (SIGSTOP) and goes on, again and again: nothing is its fault",
    honest=True,
)
async def paused_peer(attack: Attack) -> None:
    with tempfile.TemporaryDirectory(prefix="shoal-paused-") as folder:
        process = _start_honest(attack, folder)
        try:
            await pause(1.5)
            while True:
                process.send_signal(signal.SIGSTOP)
                await pause(1.0)
                process.send_signal(signal.SIGCONT)
                attack.tally["pauses"] += 1
                await pause(0.5)
        finally:
            process.kill()
            process.wait()


@kind(
    "an honest peer that asks for much, stops reading for a while, and then reads on",
    honest=True,
)
async def slow_honest_reader(attack: Attack) -> None:
    async def one(number: int) -> None:
        async with open_peer(attack, source=attack.somewhere(number), reads=False) as peer:
            for _ in range(64):
                await peer.open(identify.PROTOCOL_ID)
                await peer.open(RUN, frame(pack([b"", 0])) * 64)
            await pause(attack.seconds / 3)
            await peer.read()

    await attack.crowd(2, one)
