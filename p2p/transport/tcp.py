"""TCP: sockets as raw streams.

`TcpStream` waits with trio but calls the socket itself: receiving straight into a shared buffer
and sending without a scheduler pass are worth 5 to 10 % of bulk speed and more of a round trip.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import random
import select
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import trio

from p2p.concurrency import ConflictDetector
from p2p.door import check
from p2p.errors import ConfigError, LimitExceeded, PeerUnreachable
from p2p.multiaddr import Multiaddr
from p2p.network import Listener
from p2p.transport.dial import stagger
from p2p.transport.dns import resolve
from p2p.wire import KI

try:
    import fcntl
except ImportError:  # Windows: `p2p.node.process.check_platform` says what to do
    fcntl = None  # type: ignore[assignment]

NOT_SENT_LOW_WATER: Final = 128 * KI
"""Unsent bytes above which the kernel calls a socket full. A heartbeat cannot overtake what is
in the kernel. Two records keep the kernel busy while we seal the next. Slow lines get less
(`p2p.transport.core.budget`)."""
# For each wildcard: a family, an address reserved for documentation (RFC 5737, RFC 3849), and
# loopback.
_EVERYWHERE: Final = {
    "0.0.0.0": (socket.AF_INET, "192.0.2.1", "127.0.0.1"),
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TcpStream(trio.abc.HalfCloseableStream):
    """A connected socket (a `p2p.transport.connection.DirectStream`)."""

    def __init__(self, sock: socket.socket) -> None:
        """Wrap ``sock``, which is connected and non-blocking. The stream owns it from now
        on."""
        self._sock = sock
        self._sending = ConflictDetector("sending on this stream")
        self._sent_end = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._low_water = NOT_SENT_LOW_WATER
        self._set_low_water(NOT_SENT_LOW_WATER)
        self.remote_addr = Multiaddr.tcp(*_without_scope(sock.getpeername()))
        """Address of the other end, according to the kernel."""

    def has_gone(self) -> bool:
        """Return True if the other end has closed or reset its direction, as far as the kernel
        knows.

        Where the kernel does not tell before all is read (macOS), only a reset counts.
        """
        return self._sock.fileno() < 0 or self._is(getattr(select, "POLLRDHUP", 0))

    def has_spoken(self) -> bool:
        """Return True if there is something to read, including the end of the stream."""
        return self._sock.fileno() >= 0 and self._is(select.POLLIN)

    def _is(self, state: int) -> bool:
        asked = select.poll()
        asked.register(self._sock, state)
        return bool(asked.poll(0))

    async def receive_into(self, buffer: memoryview) -> int:
        """Receive into ``buffer`` and return the number of bytes; 0 at the end."""
        while True:
            await self._wait(trio.lowlevel.wait_readable)
            try:
                return self._sock.recv_into(buffer)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _broken(error) from error

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return available bytes, or ``b""`` at the end."""
        # Bytes of a read for which the caller names no number: one record.
        limit = (64 * KI) if max_bytes is None else operator.index(max_bytes)
        if limit < 1:
            raise ValueError("max_bytes must be at least 1")
        data = bytearray(limit)
        with memoryview(data) as buffer:
            count = await self.receive_into(buffer)
        return bytes(data[:count])

    def send_nowait(self, data: memoryview) -> int:
        """Send as much as the kernel takes at once, and return how many bytes that is."""
        self._check_open()
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _broken(error) from error

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has taken and not sent; 0 where it does not tell."""
        if fcntl is None or sys.platform != "linux" or self._sock.fileno() < 0:
            return 0
        try:
            # Linux's request for the bytes of a socket that were never sent (linux/sockios.h).
            # It costs 1 µs.
            answer = fcntl.ioctl(self._sock, 0x894B, bytes(4))
        except OSError:
            return 0  # it is dead, as the next that sends will find
        return int.from_bytes(answer, sys.byteorder)

    async def wait_unsent(self, at_most: int) -> None:
        """Return when the kernel has sent all but ``at_most`` bytes.

        The kernel calls a socket writable when less is unsent than its low water mark (since
        Linux 4.20, than half of it), so that mark is lowered for the time being.
        """
        if self.unsent <= at_most:
            return
        try:
            self._set_low_water(min(self._low_water, at_most + 1))
            while self.unsent > at_most:
                await self._wait(trio.lowlevel.wait_writable)
        finally:
            self._set_low_water(self._low_water)

    def keep_short(self, low_water: int) -> None:
        """Stop taking data while ``low_water`` bytes are unsent, from now on."""
        low_water = min(low_water, NOT_SENT_LOW_WATER)
        if low_water != self._low_water:
            self._low_water = low_water
            self._set_low_water(low_water)

    def _set_low_water(self, low_water: int) -> None:
        if hasattr(socket, "TCP_NOTSENT_LOWAT") and self._sock.fileno() >= 0:
            self._sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, max(1, low_water)
            )

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send, waiting while the kernel's buffer is full."""
        with self._sending:
            self._check_open()
            await trio.lowlevel.checkpoint()
            view = memoryview(data)
            self._check_open()
            while view:
                sent = self.send_nowait(view)
                view = view[sent:]
                if view:
                    await self._wait(trio.lowlevel.wait_writable)

    async def wait_send_all_might_not_block(self) -> None:
        """Return when the kernel's buffer has room."""
        with self._sending:
            self._check_open()
            await self._wait(trio.lowlevel.wait_writable)

    async def send_eof(self) -> None:
        """End the outgoing direction."""
        with self._sending:
            if self._sock.fileno() < 0 or not self._sent_end:
                self._check_open()
                self._sent_end = True
                try:
                    self._sock.shutdown(socket.SHUT_WR)
                except OSError as error:
                    raise _broken(error) from error
            await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Close the socket. What the kernel has taken still goes out."""
        if self._sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()
        await trio.lowlevel.checkpoint()

    def _check_open(self) -> None:
        if self._sock.fileno() < 0 or self._sent_end:
            raise trio.ClosedResourceError("this socket was closed")

    async def _wait(self, until: Callable[[socket.socket], Awaitable[None]]) -> None:
        if self._sock.fileno() < 0:
            raise trio.ClosedResourceError("this socket was closed")
        await until(self._sock)


def _broken(error: OSError) -> trio.BrokenResourceError | trio.ClosedResourceError:
    if error.errno == errno.EBADF:
        return trio.ClosedResourceError("this socket was closed")
    return trio.BrokenResourceError(str(error))


def _without_scope(name: tuple[str, int] | tuple[str, int, int, int]) -> tuple[str, int]:
    """Return host and port of a socket name. An IPv4 address mapped into IPv6 is returned as
    IPv4."""
    host = name[0].partition("%")[0]
    return host.removeprefix("::ffff:") if "." in host else host, name[1]


def _outward(wildcard: str) -> str:
    """Return this machine's address on the way to the internet, without sending anything. If
    there is no way, return the address of its first interface, or loopback.

    Raises `OSError` when the machine is out of sockets.
    """
    family, nowhere, loopback = _EVERYWHERE[wildcard]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((nowhere, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        return _of_interface(family) or loopback


def _of_interface(family: socket.AddressFamily) -> str:
    """Return the address of the first interface other than loopback that has one; empty if none
    has.

    It is for networks without a way out, such as the machines of a laboratory on one switch: by
    IPv4, on Linux (netdevice(7)).
    """
    if fcntl is None or sys.platform != "linux" or family != socket.AF_INET:
        return ""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                # Linux's request for the address of an interface: 16 bytes of its name, then a
                # sockaddr, whose fifth byte is the first of the IPv4 address.
                found = fcntl.ioctl(probe, 0x8915, name.encode().ljust(40, b"\0"))
            except OSError:  # this interface has no address
                continue
            addr = socket.inet_ntop(family, found[20:24])
            if not addr.startswith("127."):
                return addr
    return ""


class TcpListener:
    """Accepts connections on one socket."""

    def __init__(self, sock: socket.socket) -> None:
        """Wrap ``sock``, which listens and is non-blocking. The listener owns it from now
        on."""
        self.sock = sock
        self._accepted: deque[TcpStream] = deque()
        self._host, self._port = _without_scope(sock.getsockname())
        self._outward = _EVERYWHERE[self._host][2] if self._host in _EVERYWHERE else self._host

    @property
    def addr(self) -> Multiaddr:
        """The address at which it listens. For all interfaces (``0.0.0.0``) it is the address
        that this machine sends from."""
        if self._host in _EVERYWHERE:
            # Out of sockets, it is what it was: this is asked in timers, which nothing may end.
            with contextlib.suppress(OSError):
                self._outward = _outward(self._host)
        return Multiaddr.tcp(self._outward, self._port)

    async def accept(self) -> trio.abc.HalfCloseableStream:
        """Return the next connection. Raise `LimitExceeded` while the machine is out of
        sockets."""
        while not self._accepted:
            if self.sock.fileno() < 0:
                raise trio.ClosedResourceError("this listener was closed")
            await trio.lowlevel.wait_readable(self.sock)
            self._accept_waiting()
        return self._accepted.popleft()

    def _accept_waiting(self) -> None:
        # 64 at most in one pass of the scheduler, 20 µs each. With one a pass, as in trio's
        # server, a flood fills the kernel's queue (340 of them), and those that dial honestly
        # wait behind it.
        for _ in range(64):
            try:
                sock, _ = self.sock.accept()
                sock.setblocking(False)
                self._accepted.append(TcpStream(sock))
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED and not self._accepted:
                    raise LimitExceeded(
                        f"no socket for an incoming connection: {error}"
                    ) from error
                # Otherwise the dialer has gone again: not our error.

    async def aclose(self) -> None:
        """Stop listening."""
        if self.sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()
        while self._accepted:
            await self._accepted.popleft().aclose()
        await trio.lowlevel.checkpoint()


def _adopt(stream: trio.SocketStream) -> TcpStream:
    """Take the plain, non-blocking socket out of trio's stream. Raise `OSError` if it is dead
    already."""
    sock = _detached(stream.socket)
    try:
        return TcpStream(sock)
    except OSError:
        sock.close()
        raise


def _detached(wrapped: trio.socket.SocketType) -> socket.socket:
    sock = socket.socket(wrapped.family, socket.SOCK_STREAM, 0, fileno=wrapped.detach())
    sock.setblocking(False)
    return sock


class TcpNetwork:
    """The internet."""

    def __init__(self, name_servers: Sequence[tuple[str, int]] = ()) -> None:
        """Dial and listen on the internet. ``name_servers`` (hosts and ports) resolve
        ``/dnsaddr``; the default is this machine's."""
        self._name_servers = tuple(name_servers)
        # A silent name server holds a thread for half a minute, which must not delay the disk
        # or the proofs.
        self._name_threads = trio.CapacityLimiter(4)
        self._listeners: list[socket.socket] = []

    @property
    def descriptors(self) -> int:
        """Number of files and sockets that this process may have open."""
        # not at the top: Windows has none, and is told so by `p2p.node.process`
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return 2**20 if soft == resource.RLIM_INFINITY else soft

    async def dial(self, addr: Multiaddr) -> trio.abc.HalfCloseableStream:
        """Connect to ``addr``; for a name, to the first address that answers. Raise
        `PeerUnreachable` if none does."""
        check("addr", addr, Multiaddr)
        try:
            if addr.parts[0][0] == "dnsaddr":
                return await self._dial_any(await resolve(addr, self._name_servers))
            host, port = addr.host_port
            hosts = await self._look_up(addr.parts[0][0], host, port)
            found = await stagger(hosts, partial(trio.open_tcp_stream, port=port), (OSError,))
            if isinstance(found, tuple):
                return _adopt(found[0])
            raise found[0][0] if found else OSError("the name has no address")
        except (OSError, ValueError) as error:
            raise PeerUnreachable(f"{addr} does not answer: {error}") from error

    async def _dial_any(self, addrs: Sequence[Multiaddr]) -> trio.abc.HalfCloseableStream:
        """Connect to the first of the addresses of one peer that answers. Raise `OSError` if
        none does."""
        for addr in addrs:
            try:
                return await self.dial(addr)
            except PeerUnreachable as error:
                trouble = str(error)
        raise OSError(trouble)

    async def _look_up(self, kind: str, host: str, port: int) -> list[str]:
        """Return the addresses of a host, in a thread. Raise `OSError` if the lookup fails."""
        if not kind.startswith("dns"):
            return [host]
        family = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(kind, 0)
        ask = partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        found = await trio.to_thread.run_sync(
            ask, abandon_on_cancel=True, limiter=self._name_threads
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def listen(self, addr: Multiaddr) -> Listener:
        """Listen on an IP address and port; 0 picks a free port. Raise `ConfigError` if it
        cannot be had."""
        check("addr", addr, Multiaddr)
        try:
            host, port = addr.host_port
            # Connections the kernel holds until we accept them: as many as handshakes may be
            # pending.
            listeners = await trio.open_tcp_listeners(port, host=host, backlog=1024)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot listen at {addr}: {error}") from error
        for extra in listeners[1:]:
            await extra.aclose()
        listener = TcpListener(_detached(listeners[0].socket))
        self._listeners = [one for one in self._listeners if one.fileno() >= 0]
        self._listeners.append(listener.sock)
        return listener

    async def punch(self, addr: Multiaddr) -> trio.abc.HalfCloseableStream:
        """Dial ``addr`` from our listener's port, and again while it refuses. The caller sets
        the deadline. Raise `PeerUnreachable` if it fails.

        A router that gets our first packet before the other side's has left may answer with a
        reset, which closes both holes; the next packet opens them again. The jitter keeps two
        peers from dialling in step (measured: 0 of 40 without, 80 of 80 with it).
        """
        host, port = addr.host_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listeners = [o for o in self._listeners if o.fileno() >= 0 and o.family == family]
        if not listeners:
            raise PeerUnreachable(f"there is no listener from whose port to dial {addr}")
        # Dials may leave from the listener's port. This is set after the listener was bound, so
        # a second process that wants to listen there still fails: it binds without the option.
        listeners[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        place = listeners[-1].getsockname()[:2]
        while True:
            sock = trio.socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                await sock.bind(place)
                await sock.connect((host, port))
                return _adopt(trio.SocketStream(sock))
            except OSError as error:
                sock.close()
                if error.errno != errno.ECONNREFUSED:
                    raise PeerUnreachable(f"{addr} does not answer: {error}") from error
            except BaseException:
                sock.close()
                raise
            # Least and most seconds until a refused punch is tried again.
            await trio.sleep(random.uniform(0.002, 0.04))  # noqa: TID251 - real routers
