"""A switch between shaped lines that adds latency, which a bridge cannot do without netem.

As a program, ``switch.py DELAY QUEUE`` says "up" and then answers each line of its input by one
line. ``NUMBER BYTES_PER_SECOND`` gives a port its downlink; the first time it makes the port,
a TAP device named mNUMBER in the network namespace that the program runs in.
`sim.studies.lab.namespaces` moves it into a machine's namespace; the other end stays here.
``sent`` asks for the bytes that each machine has sent, as JSON. The program ends, and the
devices with it, when its input does. It imports nothing of ours, so that it starts at once.

Theory of operation
-------------------
A frame that a machine sends is here once the ``tc tbf`` on its own end has let it pass. It goes
``DELAY`` seconds later into the queue in front of the receiver's line, which empties at the
downlink's rate and holds ``QUEUE`` seconds of it; a frame that finds it full is lost, as in a
router. Frames are TCP's own large ones (``IFF_VNET_HDR``, TSO), never cut into packets: at 40
Mbit/s the kernel makes them 1 ms long, so eight busy downlinks cost a third of a core. A large
frame counts as the packets that it would be on a wire, each with its headers.

The last byte of an Ethernet address is the port's number (`mac_of`), so nothing is learnt and
nothing flooded but broadcasts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import struct
import sys
import time
from heapq import heappop, heappush
from itertools import count
from typing import Final

# From <linux/if_tun.h>.
TUNSETIFF: Final = 0x400454CA
TUNSETOFFLOAD: Final = 0x400454D0
IFF_TAP: Final = 0x0002
IFF_NO_PI: Final = 0x1000
IFF_VNET_HDR: Final = 0x4000
TUN_F_CSUM: Final = 0x01
TUN_F_TSO4: Final = 0x02
TUN_F_TSO6: Final = 0x04

VNET_HEADER: Final = struct.Struct("=BBHHHH")
"""``struct virtio_net_hdr``: flags, kind of large frame, bytes of headers, bytes of payload a
packet, and two offsets of the checksum."""
MAX_FRAME: Final = VNET_HEADER.size + 14 + 65535
"""The largest that a device hands over: 64 KiB of IP after an Ethernet header."""
AT_ONCE: Final = 64
"""Frames read of one port before the next has its turn: many times what a line sends in a tick,
and a machine that floods its device still starves no other."""
TICK: Final = 0.001
"""Seconds between two looks at all ports while frames are on their way: each frame is at most
half of that early or late, and a look is for many. A look for each took 1.6 times the CPU."""
MAC_PREFIX: Final = bytes((2, 0, 0, 0, 0))
"""Prefix of locally administered Ethernet addresses."""


def mac_of(number: int) -> str:
    """Return the Ethernet address of the machine at port ``number``, 1 to 255."""
    return ":".join(f"{byte:02x}" for byte in (*MAC_PREFIX, number))


def wire_bytes(frame: bytes) -> int:
    """Bytes of ``frame``, which begins with its `VNET_HEADER`, once cut into packets."""
    kind: int
    headers: int
    payload: int
    _, kind, headers, payload, _, _ = VNET_HEADER.unpack_from(frame)
    size = len(frame) - VNET_HEADER.size
    if not kind or not payload or size <= headers:
        return size
    packets = -(-(size - headers) // payload)
    return size + (packets - 1) * headers


class Downlink:
    """The queue in front of a machine's line."""

    def __init__(self) -> None:
        self._rate = math.inf
        self._free_at = 0.0

    def shape(self, rate: float) -> None:
        """Carry ``rate`` bytes a second from now on."""
        self._rate = rate

    def queue(self, arrives: float, size: int, longest: float) -> float | None:
        """Return the time at which the last of ``size`` bytes that arrive at ``arrives`` is
        through.

        None if more than ``longest`` seconds of other bytes are before them.
        """
        begins = max(arrives, self._free_at)
        if begins - arrives > longest:
            return None
        self._free_at = begins + size / self._rate
        return self._free_at


class Port:
    """The network device of one machine."""

    def __init__(self, number: int) -> None:
        self.downlink = Downlink()
        self.sent = 0
        """Bytes of packets that the machine has sent, headers included."""
        self.fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(self.fd, TUNSETIFF, struct.pack("16sH22x", b"m%d" % number, flags))
        fcntl.ioctl(self.fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)

    def count(self, size: int) -> None:
        """Count ``size`` bytes that the machine has sent."""
        self.sent += size

    def read(self) -> list[bytes]:
        """Return frames that the machine has sent, `AT_ONCE` at most.

        Raises:
            OSError: The machine is gone, and its device with it.
        """
        frames: list[bytes] = []
        with contextlib.suppress(BlockingIOError):  # that was the last
            while len(frames) < AT_ONCE:
                frames.append(os.read(self.fd, MAX_FRAME))
        return frames

    def write(self, frame: bytes) -> None:
        """Hand a frame to the machine."""
        # A device that is not up yet, or no more, loses the frame, as any line does.
        with contextlib.suppress(OSError):
            os.write(self.fd, frame)


class Switch:
    """All ports, and the frames on their way."""

    def __init__(self, delay: float, queue: float) -> None:
        self._ports: dict[int, Port] = {}
        self._by_fd: dict[int, Port] = {}
        self._poll = select.epoll()
        self._delay = delay
        self._queue = queue
        self._order = count()
        self._on_the_way: list[tuple[float, int, Port, bytes]] = []

    def serve(self) -> None:
        """Carry frames until standard input ends."""
        self._poll.register(sys.stdin.fileno(), select.EPOLLIN)
        while True:
            if self._on_the_way:
                select.select((), (), (), TICK)  # all frames of a tick at once
            for fd, _ in self._poll.poll(0 if self._on_the_way else None):
                if fd in self._by_fd:
                    self._take(self._by_fd[fd])
                elif not self._obey():
                    return
            self._deliver()

    def _obey(self) -> bool:
        """Carry out one order; False when there are no more."""
        match sys.stdin.readline().split():
            case []:
                return False
            case ["sent"]:
                sent = {number: port.sent for number, port in self._ports.items()}
                _say(json.dumps(sent))
            case [number, rate]:
                self._port(int(number)).downlink.shape(float(rate))
                _say("shaped")
        return True

    def _port(self, number: int) -> Port:
        port = self._ports.get(number)
        if port is None:
            port = self._ports[number] = Port(number)
            self._by_fd[port.fd] = port
            self._poll.register(port.fd, select.EPOLLIN)
        return port

    def _take(self, source: Port) -> None:
        now = time.perf_counter()
        try:
            frames = source.read()
        except OSError:
            self._poll.unregister(source.fd)
            return
        for frame in frames:
            size = wire_bytes(frame)
            source.count(size)
            to = frame[VNET_HEADER.size : VNET_HEADER.size + 6]
            if to[0] & 1:
                receivers = [port for port in self._ports.values() if port is not source]
            else:
                known = to[:-1] == MAC_PREFIX and to[-1] in self._ports
                receivers = [self._ports[to[-1]]] if known else []
            for port in receivers:
                at = port.downlink.queue(now + self._delay, size, self._queue)
                if at is not None:
                    heappush(self._on_the_way, (at, next(self._order), port, frame))

    def _deliver(self) -> None:
        until = time.perf_counter() + TICK / 2
        while self._on_the_way and self._on_the_way[0][0] <= until:
            _, _, port, frame = heappop(self._on_the_way)
            port.write(frame)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until standard input ends."""
    delay, queue = map(float, sys.argv[1:])
    _say("up")
    Switch(delay, queue).serve()


if __name__ == "__main__":
    main()
