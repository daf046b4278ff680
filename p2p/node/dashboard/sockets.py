"""Where a dashboard is asked: a socket in the node's folder always, an address if one is given.

hypercorn takes a third of a second to import. With an address it is imported at the start; for
the socket, in a thread, when somebody first asks: most nodes are never asked.
"""

from __future__ import annotations

import base64
import importlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final

import trio

from p2p.host import Host
from p2p.node.dashboard.app import Dashboard, Orders
from p2p.node.dashboard.core.door import TOKEN_BYTES, Door
from p2p.node.dashboard.feed import MAX_VIEWERS, Feed
from p2p.node.dashboard.sight import Sight
from p2p.node.panels import load_panels
from p2p.node.role import Role
from p2p.shardcast.http.core.hosts import is_loopback
from p2p.world import World

logger = logging.getLogger(__name__)

SOCKET: Final = "api.sock"
"""In the node's folder."""
_MAX_SOCKET: Final = 100
"""Bytes of its path: the kernels allow 108 and 104."""
_BACKLOG: Final = 16
"""Connections that the kernel may hold for us: as many as there are seats."""
_CONNECTIONS: Final = 4 * MAX_VIEWERS
"""At once: a page loads its parts over up to six, and keeps one."""
_STALLED: Final = 20.0
"""Seconds in which a viewer must take what was sent."""


class Faces:
    """All that shows one feed: the page, the numbers, the socket."""

    def __init__(
        self,
        world: World,
        feed: Feed,
        unready: Callable[[], str] = lambda: "",
        orders: Orders = MappingProxyType({}),
    ) -> None:
        self._world = world
        self._feed = feed
        self._unready = unready
        self._orders = orders

    def _metrics(self) -> bytes:
        from p2p.node.dashboard.metrics import write_metrics

        return write_metrics(self._feed.scene(), self._feed.panels, self._feed.viewers)

    def _app(self, door: Door, orders: Orders = MappingProxyType({})) -> Dashboard:
        return Dashboard(self._feed, door, self._metrics, self._unready, orders)

    @asynccontextmanager
    async def at_address(self, host: str, port: int) -> AsyncIterator[str]:
        """Answer at (host, port) for the length of the block; gives the URL for people. Raises
        `ConfigError` if the address cannot be had."""
        server: Any = _load_server()
        listeners = await server.open_http(host, port)
        where, bound = listeners[0].socket.getsockname()[:2]
        token = ""
        if not all(is_loopback(one.socket.getsockname()[0]) for one in listeners):
            token = base64.urlsafe_b64encode(self._world.entropy(TOKEN_BYTES)).decode()
        door = Door(token=token, name=host, cookie=f"shoal-{bound}")
        shown = f"[{where}]" if ":" in where else where
        query = f"?token={token}" if token else ""
        async with server.serve_app(self._app(door), listeners, _limits(server)):
            yield f"http://{shown}:{bound}/{query}"

    @asynccontextmanager
    async def at_folder(self, folder: Path) -> AsyncIterator[None]:
        """Answer at ``folder``/api.sock for the length of the block, to the node's owner, where
        there can be a socket: some disks have none, and the node works without."""
        path = folder / SOCKET
        with ExitStack() as stack:
            try:
                listener = stack.enter_context(_listening(path))
            except OSError as error:
                logger.warning("api_socket_left_out path=%s reason=%s", path, error)
                yield
                return
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._answer_when_asked, listener)
                yield
                nursery.cancel_scope.cancel()

    async def _answer_when_asked(self, listener: trio.SocketListener) -> None:
        await trio.lowlevel.wait_readable(listener.socket)
        try:
            server: Any = await trio.to_thread.run_sync(_load_server)
        except (ImportError, OSError) as error:  # replaced, or removed, since the node began
            logger.warning("api_socket_left_out path=%s reason=%r", SOCKET, error)
            await listener.aclose()
            return
        app = self._app(Door(), self._orders)
        async with server.serve_app(app, [listener], _limits(server)):
            await trio.sleep_forever()


def _load_server() -> ModuleType:
    return importlib.import_module("p2p.shardcast.http.server")


def _limits(server: Any) -> Any:
    return server.EdgeConfig(connections=_CONNECTIONS, stalled=_STALLED)


@contextmanager
def _listening(path: Path) -> Iterator[trio.SocketListener]:
    """A socket at ``path``, for this user alone, and removed behind us. The folder's lock keeps
    other nodes out, so what lies there was left by one that was killed. Raises `OSError`."""
    if len(os.fsencode(path)) > _MAX_SOCKET:
        raise OSError("the path is too long for a socket")
    path.unlink(missing_ok=True)
    plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # a mode that is set afterwards leaves a moment for others
    try:
        plain.bind(os.fsencode(path))
        plain.listen(_BACKLOG)
    except OSError:
        plain.close()
        raise
    finally:
        os.umask(before)
    try:
        yield trio.SocketListener(trio.socket.from_stdlib_socket(plain))
    finally:
        plain.close()
        path.unlink(missing_ok=True)


@asynccontextmanager
async def open_faces(
    world: World, host: Host, roles: Sequence[Role], folder: Path,
    address: tuple[str, int] | None,
) -> AsyncIterator[tuple[Sight, str]]:  # fmt: skip
    """A node's socket, and its page if an ``address`` is given, for the length of the block.
    Gives what looks at the node, and the page's URL or nothing. Raises `ConfigError`."""
    sight = Sight(host, roles)
    feed = Feed(world, load_panels(role.name for role in roles), sight.scene)
    faces = Faces(world, feed, sight.unready, sight.orders)
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        nursery.start_soon(feed.run)
        stack.enter_context(host.watching(sight.note))
        await stack.enter_async_context(faces.at_folder(folder))
        url = ""
        if address is not None:
            url = await stack.enter_async_context(faces.at_address(*address))
        yield sight, url
