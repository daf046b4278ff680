"""The dashboard as an ASGI application. It only shows; at the socket in the node's folder,
which is its owner's alone, it takes two orders.

=================  ============================================================================
``/``              the page; ``/page.js``, ``/page.css``, ``/uPlot.*`` are its parts
``/api/events``    server-sent events: ``whole`` once, then a ``change`` a second
``/api/picture``   the same as ``whole``, once, as JSON
``/metrics``       numbers for Prometheus
``/healthz``       200 while the node's loop turns
``/readyz``        200 once the node holds a policy, else 503 and why
``/api/pause``     POST, at the socket only: begin no work; ``/api/resume``: go on
=================  ============================================================================
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache, partial
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

from p2p.errors import LimitExceeded, ShoalError
from p2p.node.dashboard.core.door import Door, Pass
from p2p.node.dashboard.feed import Feed, as_json
from p2p.shardcast.http.app import Receive, Scope, Send, answer_while_there, is_http

STATIC: Final = files("p2p.node.dashboard") / "static"
"""Where the page's parts lie, in the checkout and in the wheel."""
PARTS: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uPlot.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}
"""By path: the file, and what it is."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Of the page: nothing that it shows can run, and it asks nobody but us."""
HEADERS: Final = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
)
"""Of every answer."""
Orders = Mapping[str, Callable[[], Awaitable[str]]]
"""By path: what a node is told to do, which returns a sentence for its owner."""
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format."""


@cache
def read_part(name: str) -> bytes:
    """A part of the page."""
    return (STATIC / name).read_bytes()


class Dashboard:
    """Answers requests for one feed, behind one door."""

    def __init__(
        self,
        feed: Feed,
        door: Door,
        metrics: Callable[[], bytes],
        unready: Callable[[], str],
        orders: Orders = MappingProxyType({}),
    ) -> None:
        """``orders`` are taken by POST; only where the owner asks there are any."""
        self._feed = feed
        self._door = door
        self._metrics = metrics
        self._unready = unready
        self._orders = orders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application, version 3, for HTTP only."""
        if await is_http(scope, receive, send):
            reply = _Reply(scope, send)
            await answer_while_there(receive, reply, partial(self._reply, scope, reply))

    async def _reply(self, scope: Scope, reply: _Reply) -> None:
        path, query = scope["path"], scope.get("query_string", b"").decode("latin-1")
        answer = self._door.judge(scope.get("server"), path, query, reply.headers)
        if scope["method"] == "POST" and path in self._orders and isinstance(answer, Pass):
            await self._obey(self._orders[path], reply)
        elif scope["method"] not in {"GET", "HEAD"}:
            await reply.text(405, "this page only shows: GET and HEAD")
        elif not isinstance(answer, Pass):
            await reply.text(answer.status, answer.reason)
        elif answer.cookie:
            moved = (("set-cookie", answer.cookie), ("location", "/"))
            await reply.send(303, b"", "text/plain", moved)
        else:
            await self._answer(path, reply)

    async def _answer(self, path: str, reply: _Reply) -> None:
        if path in PARTS:
            name, media = PARTS[path]
            await reply.send(200, read_part(name), media)
        elif path == "/api/events":
            await self._tell(reply)
        elif path == "/api/picture":
            await reply.send(200, as_json(self._feed.whole()), "application/json")
        elif path == "/metrics":
            await reply.send(200, self._metrics(), METRICS_TYPE)
        elif path == "/healthz":
            await reply.text(200, "alive")
        elif path == "/readyz":
            why_not = self._unready()
            await reply.text(503 if why_not else 200, why_not or "ready")
        else:
            await reply.text(404, "there is no such page")

    async def _obey(self, order: Callable[[], Awaitable[str]], reply: _Reply) -> None:
        try:
            await reply.text(200, await order())
        except ShoalError as error:  # no run yet, or the disk keeps no order
            await reply.text(409, str(error))

    async def _tell(self, reply: _Reply) -> None:
        try:
            with self._feed.viewing() as viewer:
                await reply.begin(200, "text/event-stream")
                while (message := await viewer.next()) is not None:
                    await reply.part(message)
                await reply.part(b"", more=False)
        except LimitExceeded as error:
            await reply.text(503, str(error))


class _Reply:
    """The answer to one request."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._has_body = scope["method"] != "HEAD"
        self.is_ending = False
        """Whether the last part has been handed over."""
        self.headers: Mapping[str, str] = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }

    async def text(self, status: int, line: str) -> None:
        """A sentence for people."""
        await self.send(status, line.encode() + b"\n", "text/plain; charset=utf-8")

    async def send(
        self, status: int, body: bytes, media: str, more: Iterable[tuple[str, str]] = ()
    ) -> None:
        """All at once."""
        await self.begin(status, media, (("content-length", str(len(body))), *more))
        await self.part(body, more=False)

    async def begin(
        self, status: int, media: str, more: Iterable[tuple[str, str]] = ()
    ) -> None:
        """The head."""
        said: Any = [("content-type", media), *HEADERS, *more]
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in said]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def part(self, data: bytes, *, more: bool = True) -> None:
        """A part of the body."""
        body = data if self._has_body else b""
        self.is_ending = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
