"""Sockets of the HTTP edge: hypercorn speaks HTTP/1.1, this module keeps its door.

hypercorn knows an idle timeout and no other: one machine could hold every descriptor with
requests that it never finishes or answers that it never reads (and hypercorn shields its writes
from cancellation). So each connection is counted by where it comes from, and is handed to
hypercorn behind a `_GuardedStream`, which gives up a peer that reads or writes too slowly.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app

from p2p.errors import ConfigError
from p2p.multiaddr import Multiaddr
from p2p.shardcast.http.app import App, HttpEdge
from p2p.swarm.core.limits import group_of
from p2p.wire import KI

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """Limits of the HTTP server."""

    connections: int = 256
    """Connections at once, over all clients. Each may hold a batch of spans (4 MiB) and
    hypercorn's buffers."""

    per_host: int = 16
    """Connections at once from one address (an IPv6 /56), with loopback exempt. shardcast's
    client uses ten, a browser six."""

    idle: float = 30.0
    """Seconds that a connection may wait between two requests, and for the end of a request."""

    stalled: float = 60.0
    """Seconds in which a client must take the next piece of a body. At 1 MiB a piece this
    demands 17 KB/s, less than any link that can train has."""

    def __post_init__(self) -> None:
        if self.connections < 1 or self.per_host < 1:
            raise ValueError("connections and per_host must be at least 1")
        if self.idle <= 0 or self.stalled <= 0:
            raise ValueError("idle and stalled must be positive")


class _Door:
    """Counts connections by the address from which they come."""

    def __init__(self, config: EdgeConfig) -> None:
        self._config = config
        self._open = 0
        self._by_host: dict[str, int] = {}

    @contextmanager
    def admit(self, host: str, port: int) -> Iterator[bool]:
        """Yield True if one more connection is allowed; it counts for the length of the
        block."""
        group = group_of(Multiaddr.tcp(host, port))
        name = group.host
        crowded = group.limited and self._by_host.get(name, 0) >= self._config.per_host
        if crowded or self._open >= self._config.connections:
            yield False
            return
        self._open += 1
        self._by_host[name] = self._by_host.get(name, 0) + 1
        try:
            yield True
        finally:
            self._open -= 1
            self._by_host[name] -= 1
            if not self._by_host[name]:
                del self._by_host[name]


class _GuardedStream:
    """A client's stream that fails, instead of waiting for ever, when the client stalls."""

    def __init__(self, stream: trio.SocketStream, config: EdgeConfig) -> None:
        self.socket = stream.socket
        """The raw socket, from which hypercorn reads the client's address."""
        self._stream = stream
        self._config = config

    async def send_all(self, data: bytes) -> None:
        """Send, or raise `trio.BrokenResourceError` if the client is gone or takes too long."""
        with trio.move_on_after(self._config.stalled):
            try:
                await self._stream.send_all(data)
            except trio.BusyResourceError:  # hypercorn closes it meanwhile
                raise trio.BrokenResourceError("the connection is being closed") from None
            return
        await trio.aclose_forcefully(self._stream)
        raise trio.BrokenResourceError("the client does not read")

    async def receive_some(self, most: int) -> bytes:
        """Return the client's next bytes, or fail if it sends none in time."""
        return bytes(await self._stream.receive_some(most))

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Http1(H11Protocol):
    """hypercorn's HTTP/1.1 protocol without its upgrades to HTTP/2.

    HTTP/2 in Python carries bulk ten times slower (hypercorn: 55 MB/s against 632 in pieces of
    256 KiB), and brings a client's
    windows, resets and header tables: a second set of limits to keep, for nothing. A client
    that offers the upgrade is answered in HTTP/1.1, as RFC 9110 has it.
    """

    async def _check_protocol(self, event: object) -> None:
        """Do nothing, where hypercorn would change the protocol."""


class _Http1Connection(TCPServer):
    """hypercorn's connection, restricted to HTTP/1.1."""

    async def _read_data(self) -> None:
        chosen = self.protocol.protocol
        http1: Any = _Http1(
            self.app, self.config, self.context, self._task_group, ConnectionState(self.state),
            chosen.ssl, chosen.client, chosen.server, self.protocol_send,
        )  # fmt: skip
        self.protocol = http1
        await super()._read_data()
        # Else a client that has gone is counted until it would have been idle for too long.
        await self.idle_task.stop()


class _Server:
    """The open connections of one application."""

    def __init__(self, app: App, config: EdgeConfig) -> None:
        self._config = config
        settings = Config()
        settings.errorlog = logger
        settings.accesslog = None
        settings.include_server_header = False
        settings.keep_alive_timeout = config.idle
        # Requests of one connection. hypercorn's default of 1,000 cuts off a client that asks
        # for one chunk a request in the middle of its download.
        settings.keep_alive_max_requests = 1_000_000
        # Bytes of a request's head: hypercorn's default, and twice the longest path.
        settings.h11_max_incomplete_size = 16 * KI
        self._settings = settings
        any_app: Any = app  # hypercorn's types of ASGI are narrower than ASGI's dictionaries
        self._app = wrap_app(any_app, self._settings.wsgi_max_body_size, "asgi")
        self._context = WorkerContext(None)
        self._door = _Door(config)
        self._streams: dict[trio.SocketStream, None] = {}

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one client for as long as it is connected."""
        async with stream:
            try:
                peer = stream.socket.getpeername()
            except OSError:
                return  # gone already
            # A socket of a folder has no address: its file's mode says who may come.
            where = peer[:2] if isinstance(peer, tuple) else ("127.0.0.1", 0)
            with self._door.admit(*where) as admitted:
                if admitted:
                    await self._converse(stream)

    async def _converse(self, stream: trio.SocketStream) -> None:
        self._streams[stream] = None
        guarded: Any = _GuardedStream(stream, self._config)
        state = ConnectionState({})
        try:
            await _Http1Connection(self._app, self._settings, self._context, state, guarded)
        except Exception:  # the border of a connection: what one client triggers ends only it
            logger.warning("http_connection_failed", exc_info=True)
        finally:
            del self._streams[stream]

    async def end(self) -> None:
        """Close all connections. hypercorn shields its writes, so cancelling is not enough."""
        await self._context.terminated.set()
        for stream in list(self._streams):
            await trio.aclose_forcefully(stream)


async def open_http(host: str, port: int) -> list[trio.SocketListener]:
    """Return sockets that listen at (host, port); port 0 picks a free port. Raise `ConfigError`
    if the address cannot be had."""
    try:
        # Connections that the kernel may hold for us: as trio's default on small machines.
        return await trio.open_tcp_listeners(port, host=host, backlog=128)
    except OSError as error:
        raise ConfigError(f"no HTTP at {host}:{port}: {error.strerror or error}") from None
    except UnicodeError:
        raise ConfigError(f"no HTTP at {host}:{port}: that is no name") from None


@asynccontextmanager
async def serve_app(
    app: App, listeners: list[trio.SocketListener], config: EdgeConfig | None = None
) -> AsyncIterator[None]:
    """Answer HTTP requests on ``listeners`` for the length of the block."""
    server = _Server(app, config or EdgeConfig())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, server.handle, listeners)
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                await server.end()
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def serve_http(
    edge: HttpEdge, host: str, port: int, config: EdgeConfig | None = None
) -> AsyncIterator[Sequence[tuple[str, int]]]:
    """Answer HTTP requests at (host, port) for the length of the block; port 0 takes any.

    Gives the addresses that it listens at. Raises `ConfigError` if it cannot.
    """
    listeners = await open_http(host, port)
    async with serve_app(edge, listeners, config), trio.open_nursery() as nursery:
        nursery.start_soon(edge.keep_listing)
        yield [listener.socket.getsockname()[:2] for listener in listeners]
        nursery.cancel_scope.cancel()
