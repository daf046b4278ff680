"""TCP: sockets as raw streams.

`TcpStream` waits with trio but calls the socket itself: receiving straight into a shared buffer and
sending without a scheduler pass are worth 5 to 10 % of bulk speed and more of a round trip.
"""

from __future__ import annotations

import errno
import operator
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from p2p.errors import ConfigError, LimitExceeded, PeerUnreachable
from p2p.multiaddr import Multiaddr
from p2p.network import Listener
from p2p.wire import KI

NOT_SENT_LOW_WATER: Final = 128 * KI
"""Bytes the kernel holds unsent before it calls a socket full: what is in the kernel cannot be overtaken
by a heartbeat any more. Two records keep it busy while we seal the next."""
BACKLOG: Final = 512
"""Connections the kernel holds until we accept them; more than our limit on pending handshakes."""
_DEFAULT_READ: Final = 64 * KI
_FAMILY: Final = {"dns4": socket.AF_INET, "dns6": socket.AF_INET6}
# For each wildcard: a family, an address reserved for documentation (RFC 5737, RFC 3849), and loopback.
_EVERYWHERE: Final = {
    "0.0.0.0": (socket.AF_INET, "192.0.2.1", "127.0.0.1"),
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class TcpStream(trio.abc.HalfCloseableStream):
    """One connected socket (a `p2p.transport.wakeup.DirectStream`)."""

    def __init__(self, sock: socket.socket) -> None:
        """``sock`` is connected and non-blocking; the stream owns it from now on."""
        self._sock = sock
        self._sending = False
        self._sent_end = False
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOT_SENT_LOW_WATER)
        self.remote_addr = Multiaddr.tcp(*_without_scope(sock.getpeername()))
        """Whom the kernel says this is."""

    async def receive_into(self, buffer: memoryview) -> int:
        """Receive into ``buffer``; 0 at the end."""
        while True:
            await self._wait(trio.lowlevel.wait_readable)
            try:
                return self._sock.recv_into(buffer)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _broken(error) from error

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Whatever is there, or ``b""`` at the end."""
        limit = _DEFAULT_READ if max_bytes is None else operator.index(max_bytes)
        if limit < 1:
            raise ValueError("max_bytes must be at least 1")
        while True:
            await self._wait(trio.lowlevel.wait_readable)
            try:
                return self._sock.recv(limit)
            except BlockingIOError:
                continue
            except OSError as error:
                raise _broken(error) from error

    def send_nowait(self, data: memoryview) -> int:
        """Send what the kernel takes at once."""
        if self._sock.fileno() < 0 or self._sent_end:
            raise trio.ClosedResourceError("this socket was closed")
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _broken(error) from error

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send, waiting while the kernel's buffer is full."""
        self._check_sending()
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            view = memoryview(data)
            self._check_open()
            while view:
                sent = self.send_nowait(view)
                view = view[sent:]
                if view:
                    await self._wait(trio.lowlevel.wait_writable)
        finally:
            self._sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """Return when the kernel's buffer has room."""
        self._check_sending()
        self._sending = True
        try:
            await self._wait(trio.lowlevel.wait_writable)
        finally:
            self._sending = False

    async def send_eof(self) -> None:
        """End the outgoing direction."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        if self._sock.fileno() < 0:
            raise trio.ClosedResourceError("this socket was closed")
        if not self._sent_end:
            self._sent_end = True
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                raise _broken(error) from error
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        """Close the socket; what the kernel has taken still goes out."""
        if self._sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()
        await trio.lowlevel.checkpoint()

    def _check_sending(self) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._check_open()

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
    """Host and port of a socket name; IPv4 in IPv6's clothes comes as IPv4."""
    host = name[0].partition("%")[0]
    return host.removeprefix("::ffff:") if "." in host else host, name[1]


def _outward(wildcard: str) -> str:
    """This machine's address on the way to the internet, or loopback without one. Sends nothing."""
    family, nowhere, loopback = _EVERYWHERE[wildcard]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((nowhere, 9))
        except OSError:
            return loopback
        return str(probe.getsockname()[0])


class TcpListener:
    """Accepts connections on one socket."""

    def __init__(self, listener: trio.SocketListener) -> None:
        self._listener = listener
        self._host, self._port = _without_scope(listener.socket.getsockname())

    @property
    def addr(self) -> Multiaddr:
        """Where it really listens; on all interfaces (``0.0.0.0``), the one this machine sends from now."""
        outward = _outward(self._host) if self._host in _EVERYWHERE else self._host
        return Multiaddr.tcp(outward, self._port)

    async def accept(self) -> trio.abc.HalfCloseableStream:
        """The next connection. Raises `LimitExceeded` while the machine is out of sockets."""
        while True:
            try:
                stream = await self._listener.accept()
                return _adopt(stream)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    raise LimitExceeded(f"no socket for an incoming connection: {error}") from error
                # Whoever knocked has gone again: not our error.

    async def aclose(self) -> None:
        """Stop listening."""
        await self._listener.aclose()


def _adopt(stream: trio.SocketStream) -> TcpStream:
    """Take the plain, non-blocking socket out of trio's stream. Raises `OSError` if it is dead already."""
    family = stream.socket.family
    sock = socket.socket(family, socket.SOCK_STREAM, 0, fileno=stream.socket.detach())
    sock.setblocking(False)
    try:
        return TcpStream(sock)
    except OSError:
        sock.close()
        raise


class TcpNetwork:
    """The internet."""

    async def dial(self, addr: Multiaddr) -> trio.abc.HalfCloseableStream:
        """Connect to ``addr``, a name's addresses in parallel. Raises `PeerUnreachable`."""
        try:
            host, port = addr.host_port
            family = _FAMILY.get(addr.parts[0][0])
            if family is not None:
                found = await trio.socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
                host = str(found[0][4][0])
            return _adopt(await trio.open_tcp_stream(host, port))
        except (OSError, ValueError) as error:
            raise PeerUnreachable(f"{addr} does not answer: {error}") from error

    async def listen(self, addr: Multiaddr) -> Listener:
        """Listen on an IP address and port; 0 picks a free port. Raises `ConfigError`."""
        try:
            host, port = addr.host_port
            listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot listen at {addr}: {error}") from error
        for extra in listeners[1:]:
            await extra.aclose()
        return TcpListener(listeners[0])
