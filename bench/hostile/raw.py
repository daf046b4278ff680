"""Tools of the attacks on a live node: sockets, and connections whose Yamux frames are written
by hand.

Negotiation and Noise are the product's own; everything above is bytes that the attack chooses,
legal or not. All traffic stays on the loopback interface: `Target` refuses other hosts.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import Final

import trio

from p2p.dht.stamp import DIFFICULTY, NONCE_BYTES, make_stamp
from p2p.errors import BadMessage, ShoalError
from p2p.identity import KeyPair, PeerId
from p2p.multiaddr import Multiaddr
from p2p.swarm import identify
from p2p.transport.connection import Secured, secure
from p2p.transport.core.negotiate import HEADER as MULTISTREAM, line
from p2p.transport.core.noise import StaticKey
from p2p.wire import decode_varint_untrusted, frame

FRAME: Final = struct.Struct(">BBHII")
"""A Yamux header: version, type, flags, stream id, length."""
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
WINDOW: Final = 256 * 1024
"""Bytes a stream may carry before its reader gives credit."""
KEPT: Final = 64 * 1024
"""Bytes of one stream that the attacker remembers."""
PATIENCE: Final = 5.0
"""Seconds an attacker waits for a connection or a handshake before it tries again."""
RETRY: Final = 0.05
"""Seconds between two tries of one worker: a refused attack is not to measure the attacker's
own CPU.
"""

TROUBLE: Final = (
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.BusyResourceError,
    trio.TooSlowError,
    ShoalError,
)
"""Errors that an attack meets when its target defends itself."""


async def pause(seconds: float) -> None:
    """Let real time pass."""
    await trio.sleep(seconds)  # noqa: TID251 - an attacker is no node: it lives on the machine's clock


@dataclass(frozen=True, slots=True)
class Target:
    """The node that is attacked."""

    host: str
    port: int
    peer: PeerId

    def __post_init__(self) -> None:
        if not ipaddress.ip_address(self.host).is_loopback:
            raise ValueError(f"attacks run against loopback only, not against {self.host}")

    @classmethod
    def parse(cls, addr: str) -> Target:
        """Parse an address as a node prints it."""
        parsed = Multiaddr.parse(addr)
        assert parsed.peer_id is not None
        return cls(*parsed.host_port, parsed.peer_id)


@dataclass(slots=True)
class Attack:
    """An attack under way: target, duration, and counts."""

    target: Target
    seconds: float
    run_id: bytes
    """Id of the target's run, as read in the run document."""
    rng: Random
    tree: str = ""
    """Checkout of the node's code, for attacks that bring an honest peer along."""
    tally: Counter[str] = field(default_factory=Counter)

    def key(self) -> KeyPair:
        """Return a fresh identity."""
        return KeyPair(self.rng.randbytes(32))

    async def dial(self, source: str = "") -> trio.SocketStream:
        """Open a plain connection, from ``source`` if it is given."""
        sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            if source:
                await sock.bind((source, 0))
            with trio.fail_after(PATIENCE):
                await sock.connect((self.target.host, self.target.port))
        except BaseException:
            sock.close()
            raise
        self.tally["connections"] += 1
        return trio.SocketStream(sock)

    async def crowd(
        self, count: int, one: Callable[[int], Awaitable[None]], retry: float = RETRY
    ) -> None:
        """Run ``count`` workers that repeat ``one`` until the attack's time is up."""

        async def worker(number: int) -> None:
            while True:
                try:
                    await one(number)
                except* TROUBLE:
                    self.tally["failures"] += 1
                await pause(retry)

        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(worker, number)

    def somewhere(self, number: int) -> str:
        """Return one of many loopback addresses, as if the attacker had that many machines."""
        return f"127.{1 + number % 200}.{1 + number // 200 % 200}.{2 + number % 250}"


def minted(number: int) -> KeyPair:
    """Return an identity whose work stamp was paid for beforehand."""
    return KeyPair(sha256(b"attacker %d" % (number % len(_NONCES))).digest())


@functools.cache
def stamp_of(peer: PeerId) -> bytes:
    """Return the work stamp of an identity; it takes half a second of CPU if it is not
    minted.
    """
    return _MINTED.get(peer) or make_stamp(peer, DIFFICULTY)


_NONCES: Final = (
    732858, 2014887, 387370, 1001558, 468046, 2850362, 509886, 640079, 1803641, 1212972,
    1908654, 206837, 507420, 1037183, 469582, 3896158, 1235488, 980982, 370211, 2351475, 533183,
    1837313, 135483, 439813, 593173, 278656, 306886, 453040, 1243676, 689773, 1301231, 15777,
)  # fmt: skip
_MINTED: Final = {
    minted(number).peer_id: nonce.to_bytes(NONCE_BYTES, "big")
    for number, nonce in enumerate(_NONCES)
}


class RawPeer:
    """A secured connection of an attacker. Open it with `open_peer`."""

    def __init__(
        self, attack: Attack, stream: trio.SocketStream, secured: Secured, key: KeyPair
    ) -> None:
        self.key = key
        self.gone = trio.Event()
        """Set when the target has closed the connection."""
        self.inbox: dict[int, bytearray] = {}
        """Received bytes of each stream, behind its negotiation if the target opened it."""
        self.opened: dict[int, str] = {}
        """Streams that the target opened, and their protocols."""
        self.info = b""
        """Answer to identify; if empty, none is given."""
        self.credits = True
        """True if received bytes are given back as window."""
        self._attack = attack
        self._stream = stream
        self._session = secured.session
        self._buffer = bytearray(secured.early)
        self._next_id = 1
        self._stirred = trio.Event()
        self._lock = trio.Lock()

    async def send(self, plaintext: bytes) -> None:
        """Seal and send bytes of the muxer."""
        async with self._lock:
            sealed = self._session.seal(plaintext)
            self._attack.tally["bytes"] += len(sealed)
            await self._stream.send_all(sealed)

    async def frame(
        self, kind: int, flags: int, stream: int, length: int, body: bytes = b""
    ) -> None:
        """Encode a Yamux frame, right or wrong."""
        await self.send(FRAME.pack(0, kind, flags, stream, length) + body)

    async def data(self, stream: int, body: bytes, flags: int = 0) -> None:
        """Encode bytes of a stream, whatever its window."""
        await self.frame(DATA, flags, stream, len(body), body)

    def next_id(self) -> int:
        """Return the id of the next stream that this side opens."""
        self._next_id += 2
        return self._next_id - 2

    async def open(self, protocol: str, body: bytes = b"", flags: int = 0) -> int:
        """Open a stream with its negotiation and first bytes in one frame."""
        stream = self.next_id()
        await self.data(stream, line(MULTISTREAM) + line(protocol) + body, SYN | flags)
        return stream

    async def reply(self, stream: int, count: int) -> bytes:
        """Wait for ``count`` bytes of a stream."""
        while len(self.inbox.get(stream, b"")) < count:
            if self.gone.is_set():
                raise trio.BrokenResourceError("the target hung up")
            await self._stirred.wait()
        return bytes(self.inbox[stream][:count])

    async def read(self) -> None:
        """Read everything until the target closes."""
        try:
            await self._parse()
            while data := await self._stream.receive_some(64 * 1024):
                for plaintext in self._session.receive_data(data):
                    self._buffer += plaintext
                await self._parse()
                self._stirred.set()
                self._stirred = trio.Event()
        except TROUBLE:
            self._attack.tally["broken"] += 1
        self.gone.set()
        self._stirred.set()

    async def _parse(self) -> None:
        out = bytearray()
        while len(self._buffer) >= FRAME.size:
            _, kind, flags, stream, length = FRAME.unpack_from(self._buffer)
            end = FRAME.size + (length if kind == DATA else 0)
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[FRAME.size : end])
            del self._buffer[:end]
            if kind == PING and flags & SYN:
                out += FRAME.pack(0, PING, ACK, 0, length)
            if stream and stream % 2 == 0 and flags & SYN:
                self.opened[stream] = ""
            if body:
                out += self._take(stream, body)
            if flags & RST:
                self._attack.tally["resets"] += 1
        if out:
            await self.send(bytes(out))

    def _take(self, stream: int, body: bytes) -> bytes:
        """Take bytes of a stream and return the frames to answer with."""
        kept = self.inbox.setdefault(stream, bytearray())
        kept += body[: max(0, KEPT - len(kept))]
        out = b""
        if self.opened.get(stream) == "":
            out = self._negotiate(stream, kept)
        if self.credits:
            out += FRAME.pack(0, WINDOW_UPDATE, 0, stream, len(body))
        return out

    def _negotiate(self, stream: int, kept: bytearray) -> bytes:
        """Accept whatever the target proposes; answer identify as the attack wants."""
        lines: list[str] = []
        offset = 0
        while len(lines) < 2:
            try:
                head = decode_varint_untrusted(kept, offset)
            except BadMessage:
                return b""
            if head is None or len(kept) < head[1] + head[0]:
                return b""
            lines.append(bytes(kept[head[1] : head[1] + head[0] - 1]).decode(errors="replace"))
            offset = head[1] + head[0]
        del kept[:offset]
        protocol = self.opened[stream] = lines[1]
        answer, flags = line(MULTISTREAM) + line(protocol), ACK
        if protocol == identify.PROTOCOL_ID and self.info:
            answer, flags = answer + frame(self.info), ACK | FIN
        return FRAME.pack(0, DATA, flags, stream, len(answer)) + answer


@asynccontextmanager
async def open_peer(
    attack: Attack,
    *,
    source: str = "",
    key: KeyPair | None = None,
    info: bytes = b"",
    reads: bool = True,
) -> AsyncIterator[RawPeer]:
    """Open a connection with finished handshake; ``reads`` says if the attacker reads from
    it.
    """
    key = key or attack.key()
    stream = await attack.dial(source)
    try:
        with trio.fail_after(PATIENCE):
            static = StaticKey.create(key, attack.rng.randbytes(32))
            secured = await secure(
                stream, static, attack.rng.randbytes, dialer=True, expected=attack.target.peer
            )
        attack.tally["handshakes"] += 1
        peer = RawPeer(attack, stream, secured, key)
        peer.info = info
        async with trio.open_nursery() as nursery:
            if reads:
                nursery.start_soon(peer.read)
            yield peer
            nursery.cancel_scope.cancel()
    finally:
        await trio.aclose_forcefully(stream)
