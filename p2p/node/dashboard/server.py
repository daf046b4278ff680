"""HTTP server of the dashboard: its paths, and who may ask for them. All of it is read-only,
except for two orders that only the node's owner can give, at the socket in the node's folder.

=================  ============================================================================
``/``              the page; ``/page.js``, ``/page.css``, ``/uPlot.*`` are its parts
``/api/events``    server-sent events: a snapshot a second, as JSON
``/api/picture``   one such snapshot
``/metrics``       numbers for Prometheus
``/healthz``       200 while the node's loop turns
``/readyz``        200 once the node holds a policy, else 503 and why
``/api/pause``     POST, at the socket only: begin no work; ``/api/resume``: go on
=================  ============================================================================

An attacker could read what the page shows, or use up its few connections. Access depends on
where the server listens:

* On loopback every user of this machine may look. A web page of another site may not. Its
  server can make its own name resolve to 127.0.0.1 (DNS rebinding), so the Host header must
  name this machine by address or as localhost. Its background requests are refused by
  ``Sec-Fetch-Site``, which no page can set.
* On other addresses a token is needed, a new one for each start. The node prints an address
  with the token, which the browser then keeps as a cookie that scripts cannot read. Programs
  send the token as a bearer token.
* The socket in the node's folder has a file mode that admits only the node's owner.

hypercorn takes a third of a second to import. With an address it is imported at the start; for
the socket, in a thread, when somebody first asks: most nodes are never asked.
"""

from __future__ import annotations

import base64
import hmac
import importlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Final
from urllib.parse import parse_qs

import trio

from p2p.errors import LimitExceeded, ShoalError
from p2p.host import Host
from p2p.node.dashboard.page import PARTS, read_part
from p2p.node.dashboard.snapshots import MAX_VIEWERS, OwnView, Snapshots, as_json
from p2p.node.folders import SOCKET
from p2p.node.panels import load_panels
from p2p.node.role import Role
from p2p.shardcast.http.app import Receive, Reply, Scope, Send, answer_http
from p2p.shardcast.http.core.answers import is_loopback, machine_named
from p2p.world import World

logger = logging.getLogger(__name__)

_HEADERS: Final = (
    # Nothing that the page shows can run, and it asks nobody but us.
    ("content-security-policy",
     "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
     " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
)  # fmt: skip
"""Headers of every answer."""
Orders = Mapping[str, Callable[[], Awaitable[str]]]
"""Maps paths to orders, each of which returns a sentence for the owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Access rule of one listening address."""

    token: str = ""
    """Token that viewers must show; empty on loopback, and for a socket in the node's
    folder."""
    name: str = ""
    """Host name under which the address was given, which requests may use besides addresses."""
    cookie: str = "shoal"
    """Name of the cookie. It includes the port, since browsers keep cookies by machine."""

    def judge(
        self, server: tuple[str, int | None] | None, path: str, query: str,
        headers: Mapping[str, str],
    ) -> tuple[int, str]:  # fmt: skip
        """Judge a request. Return 200 if it may be answered, 303 and a cookie to set first, or
        the status and reason of a refusal. ``server`` is the address that received the request;
        None for a socket in the node's folder."""
        if server is None:
            return 200, ""
        if not self._names_us(headers.get("host", ""), server[0]):
            return 421, "this machine is not called so: ask by its address"
        is_visit = path == "/" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not is_visit:
            return 403, "pages of other sites may not read this"
        # Supervisors have no token, and learn nothing from these paths but whether.
        if not self.token or path in ("/healthz", "/readyz") or self._has_token(headers):
            return 200, ""
        shown = parse_qs(query[:256]).get("token", [""])[0]
        if path == "/" and _same(shown, self.token):
            return 303, f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/"
        return 401, "open the address that the node printed: it has the token in it"

    def _names_us(self, host: str, server: str) -> bool:
        if self.name and host.partition(":")[0].lower() == self.name.lower():
            return True
        name = machine_named(host)
        return name is not None and (not is_loopback(server) or is_loopback(name))

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        cookies = (one.strip().partition("=") for one in headers.get("cookie", "").split(";"))
        shown = [value for name, _, value in cookies if name == self.cookie]
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        shown += [bearer.strip()] if scheme.lower() == "bearer" else []
        return any(_same(one, self.token) for one in shown)


def _same(shown: str, token: str) -> bool:
    return hmac.compare_digest(shown.encode("utf-8", "replace"), token.encode())


class Dashboard:
    """Page, metrics and socket of one swarm."""

    def __init__(
        self,
        world: World,
        snapshots: Snapshots,
        unready: Callable[[], str] = lambda: "",
        orders: Orders = MappingProxyType({}),
    ) -> None:
        """Prepare the dashboard. ``orders`` are accepted only at the socket in the node's
        folder."""
        self._world = world
        self._snapshots = snapshots
        self._unready = unready
        self._orders = orders

    @asynccontextmanager
    async def at_address(self, host: str, port: int) -> AsyncIterator[str]:
        """Serve at (host, port) for the length of the block, and yield the URL for people.

        Raises:
            ConfigError: The address is not available.
        """
        server: Any = _load_server()
        listeners = await server.open_http(host, port)
        where, bound = listeners[0].socket.getsockname()[:2]
        token = ""
        if not all(is_loopback(one.socket.getsockname()[0]) for one in listeners):
            # Random bytes of a token.
            token = base64.urlsafe_b64encode(self._world.entropy(18)).decode()
        access = Access(token=token, name=host, cookie=f"shoal-{bound}")
        shown = f"[{where}]" if ":" in where else where
        query = f"?token={token}" if token else ""
        app = partial(self._answer, access, {})
        async with server.serve_app(app, listeners, _limits(server)):
            yield f"http://{shown}:{bound}/{query}"

    @asynccontextmanager
    async def at_folder(self, folder: Path) -> AsyncIterator[None]:
        """Serve the node's owner at ``folder``/api.sock for the length of the block. On a disk
        without sockets, the node works without it."""
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
        app = partial(self._answer, Access(), self._orders)
        async with server.serve_app(app, [listener], _limits(server)):
            await trio.sleep_forever()

    async def _answer(
        self, access: Access, orders: Orders, scope: Scope, receive: Receive, send: Send
    ) -> None:
        answer = partial(self._reply, access, orders, scope)
        await answer_http(_Reply, answer, scope, receive, send)

    async def _reply(self, access: Access, orders: Orders, scope: Scope, reply: _Reply) -> None:
        path, query = scope["path"], scope.get("query_string", b"").decode("latin-1")
        status, said = access.judge(scope.get("server"), path, query, reply.headers)
        if scope["method"] == "POST" and path in orders and status == 200:
            try:
                await reply.text(200, await orders[path]())
            except ShoalError as error:  # no run yet, or the disk keeps no order
                await reply.text(409, str(error))
        elif scope["method"] not in {"GET", "HEAD"}:
            await reply.text(405, "this page only shows: GET and HEAD")
        elif status == 303:
            moved = (("set-cookie", said), ("location", "/"))
            await reply.send(303, b"", "text/plain", *moved)
        elif status != 200:
            await reply.text(status, said)
        elif path in PARTS:
            name, media = PARTS[path]
            await reply.send(200, read_part(name), media)
        elif path == "/api/events":
            await self._stream(reply)
        elif path == "/api/picture":
            await reply.send(200, as_json(self._snapshots.whole()), "application/json")
        elif path == "/metrics":
            from p2p.node.dashboard.metrics import write_metrics

            shown = self._snapshots
            body = write_metrics(shown.view(), shown.panels, shown.viewers)
            await reply.send(200, body, "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/healthz":
            await reply.text(200, "alive")
        elif path == "/readyz":
            why_not = self._unready()
            await reply.text(503 if why_not else 200, why_not or "ready")
        else:
            await reply.text(404, "there is no such page")

    async def _stream(self, reply: _Reply) -> None:
        try:
            with self._snapshots.viewing() as wait_picture:
                await reply.begin(200, ("content-type", "text/event-stream"), *_HEADERS)
                while True:
                    await reply.part(await wait_picture())
        except LimitExceeded as error:
            await reply.text(503, str(error))


class _Reply(Reply):
    async def text(self, status: int, line: str) -> None:
        await self.send(status, line.encode() + b"\n", "text/plain; charset=utf-8")

    async def send(self, status: int, body: bytes, media: str, *more: tuple[str, str]) -> None:
        await self.whole(status, body, ("content-type", media), *_HEADERS, *more)


def _load_server() -> ModuleType:
    return importlib.import_module("p2p.shardcast.http.server")


def _limits(server: Any) -> Any:
    # A page loads its parts over up to six connections, and keeps one. A viewer has 20 s to
    # take what was sent.
    return server.EdgeConfig(connections=4 * MAX_VIEWERS, stalled=20.0)


@contextmanager
def _listening(path: Path) -> Iterator[trio.SocketListener]:
    """Open a socket at ``path`` for this user alone, and remove it at the end. A socket that is
    already there was left by a killed node, since the folder's lock keeps other nodes out.

    Raises:
        OSError: The path is too long, or the disk has no sockets.
    """
    # Bytes of its path: the kernels allow 108 and 104.
    if len(os.fsencode(path)) > 100:
        raise OSError("the path is too long for a socket")
    path.unlink(missing_ok=True)
    plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # a mode that is set afterwards leaves a moment for others
    try:
        plain.bind(os.fsencode(path))
        plain.listen(MAX_VIEWERS)
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
async def open_dashboard(
    world: World, host: Host, roles: Sequence[Role], folder: Path,
    address: tuple[str, int] | None,
) -> AsyncIterator[tuple[OwnView, str]]:  # fmt: skip
    """Open a node's socket, and its page if an ``address`` is given, for the length of the
    block. Yield the node's view, and the page's URL or an empty text.

    Raises:
        ConfigError: The address is not available.
    """
    own = OwnView(host, roles)
    snapshots = Snapshots(world, load_panels(role.name for role in roles), own.view)
    orders = {"/api/pause": own.pause, "/api/resume": own.resume}
    dashboard = Dashboard(world, snapshots, own.unready, orders)
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        nursery.start_soon(partial(snapshots.run, keeps=True))
        stack.enter_context(host.watching(own.note))
        await stack.enter_async_context(dashboard.at_folder(folder))
        url = ""
        if address is not None:
            url = await stack.enter_async_context(dashboard.at_address(*address))
        yield own, url
