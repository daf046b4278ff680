"""The edge as an ASGI application: which answer belongs to which path.

====================================  ==========================================================
``/``                                 the versions that are here, as JSON; for a browser a page
                                      with their files
``/v/7/manifest``                     as its publisher signed it
``/v/7/files``, ``/v/7/files/NAME``   the list of files as JSON, and each file
``/v/7/raw``                          all files end to end: the stream that the manifest's spans
                                      cut, so a span is a range of it
``/v/7.tar``                          all files as one archive
``/latest/...``                       a redirection to the newest version
``/distribution.txt``,                the same versions for the clients and middle nodes of the
``/v7/shard_00001.bin``,              PyPI package shardcast 0.3.2: a version of several files
``/data1.bin``                        is one archive
====================================  ==========================================================

Whatever belongs to a version never changes, says so (``immutable``), has a strong ETag and can
be asked for in ranges: caches may keep it, and ``curl -C -`` resumes. A body is read in pieces
as the connection takes them, so a download costs a piece of memory whatever its size. What is
read is compared with its digests first: where a file has changed since its version was
published, the answer is 410, and a body that has begun ends before its length.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import partial
from html import escape
from typing import Any, Final, TypeVar
from urllib.parse import quote

import trio

from p2p.bounded import BoundedDict
from p2p.errors import StorageError
from p2p.shardcast.http.core import answers
from p2p.shardcast.http.library import PIECE, FileChanged, Library, Reader, Release
from p2p.shardcast.manifest import NO_POLICY, PolicyVersion
from p2p.wire import KI
from p2p.world import World

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""

NEVER: Final = "no-cache"
"""Cache-Control header of the list of versions, for which clients ask each time."""
_OCTETS: Final = "application/octet-stream"
_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Files by Shoal</title>
<meta name="viewport" content="width=device-width"><style>
html { background: #f6f5f1; color: #1b1f23; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 46rem; margin: 2rem auto; padding: 0 1rem } a { color: #0a6b70 }
table { width: 100%; border-collapse: collapse }
th, td { text-align: left; padding: .3rem .5rem }
tr { border-bottom: 1px solid #8884 } td { overflow-wrap: anywhere }
th + th, td + td { text-align: right; white-space: nowrap }
@media (prefers-color-scheme: dark) {
html { background: #101417; color: #e9e7e1 } a { color: #56c7bf } }</style><main>
"""


class HttpEdge:
    """Serves a library to HTTP clients; `keep_listing` must run beside it."""

    def __init__(
        self, world: World, library: Library, on_changed: Callable[[str], None] = lambda _: None
    ) -> None:
        """Serve ``library``. ``on_changed`` is called with the name of a file that differs from
        what was published, at each request for the file."""
        self._world = world
        self._library = library
        self._on_changed = on_changed
        # More than a node keeps; each takes a megabyte if a version has thousands of files.
        self._readers: BoundedDict[bytes, Reader] = BoundedDict(64)
        """Maps the digest of a release to its reader."""

    async def keep_listing(self) -> None:
        """Keep the list of versions for shardcast's clients up to date.

        Those clients believe only the digest of a version's one file, so each version is read
        once, in the background, before it is listed.
        """
        known = NO_POLICY
        while True:
            await self._library.wait_news(known)
            versions = list(self._library.versions)
            known = max(versions, default=known)
            for version in versions:
                await self._list(version)

    async def _list(self, version: PolicyVersion) -> None:
        try:
            with self._library.borrow(version) as release:
                await self._reader(release).make_archive()
        except KeyError:
            pass  # pruned meanwhile: not listed either
        except FileChanged as changed:
            self._on_changed(str(changed))
        except StorageError as error:
            logger.warning("version_not_listed version=%d reason=%s", version, error)

    def _reader(self, release: Release) -> Reader:
        reader = self._readers.get(release.digest)
        if reader is None or reader.release != release:
            archive = reader.archive if reader is not None else None  # the same, elsewhere
            reader = self._readers[release.digest] = Reader(self._world, release)
            reader.archive = archive
        return reader

    # ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await answer_http(_Reply, partial(self._reply, scope), scope, receive, send)

    async def _reply(self, scope: Scope, reply: _Reply) -> None:
        path = scope["path"]
        if scope["method"] not in {"GET", "HEAD"}:
            await reply.refuse(405, "only GET and HEAD", ("allow", "GET, HEAD"))
        elif not _is_meant(scope, reply.headers.get("host", "")):
            await reply.refuse(421, "this address serves this machine, under its own name")
        # Characters of a path: the longest of a manifest's files, percent-encoded, and some
        # more.
        elif len(path) > 8 * 1024:
            await reply.refuse(414, "the path is too long")
        else:
            await self._answer(path.lstrip("/"), reply)

    async def _answer(self, path: str, reply: _Reply) -> None:
        if path == "" and "text/html" in reply.headers.get("accept", ""):
            # The publisher chooses the names of files: no script may run.
            policy = (
                "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none';"
                " form-action 'none'; frame-ancestors 'none'"
            )
            header = "content-security-policy", policy
            await reply.text(self._page(), "text/html; charset=utf-8", header)
        elif path == "":
            await reply.text(self._contents(), "application/json")
        elif path == answers.LISTING:
            await reply.text(self._listing(), "text/plain; charset=utf-8")
        elif path == "data1.bin":
            # shardcast's clients time a server by this file: 5 ms at 100 Mbit/s.
            await reply.text(bytes(64 * KI), _OCTETS)
        elif path.startswith("latest/"):
            newest = max(self._library.versions, default=None)
            where = f"/v/{newest}/{quote(path.removeprefix('latest/'))}"
            if newest is None:
                await reply.refuse(404, "no version is here yet")
            else:
                await reply.refuse(307, f"the newest is at {where}", ("location", where))
        else:
            await self._serve(path, reply)

    async def _serve(self, path: str, reply: _Reply) -> None:
        shard = answers.parse_shard_path_untrusted(path)
        version = shard[0] if shard is not None else _version_of(path)
        try:
            if version is None:
                raise KeyError(path)
            with self._library.borrow(version) as release:
                body, media, part = self._part(release, path, shard[1] if shard else None)
                tag = answers.etag(release.digest, part)
                await reply.body(body, media, tag, self._reader(release))
        except KeyError:
            await reply.refuse(404, f"there is no {path[:200]!r} here")
        except FileChanged as changed:
            self._on_changed(str(changed))
            await reply.fail(410, f"{changed} changed since it was published")
        except StorageError as error:
            logger.warning("edge_unreadable path=%s reason=%s", path[:200], error)
            await reply.fail(503, "this disk does not give it back")

    def _part(
        self, release: Release, path: str, shard: int | None
    ) -> tuple[answers.Body, str, str]:
        """Return the body, media type and name of the part of a version that a path names.

        Raises:
            KeyError: The version has no such part, or is not listed yet.
        """
        what = path.removeprefix(f"v/{release.version}")
        if shard is not None:
            whole = self._archive(release)
            if shard >= answers.shard_count(whole.size):
                raise KeyError(path)
            start = shard * answers.SHARD_BYTES
            end = min(start + answers.SHARD_BYTES, whole.size)
            pieces = whole.pieces(start, end, answers.SHARD_BYTES)
            return answers.Body(list(pieces)), _OCTETS, f"s{shard}"
        if what == ".tar":
            is_short = release.is_one_file
            tar = answers.tar_of(release.files) if is_short else self._archive(release)
            return tar, "application/x-tar", "tar"
        if what == "/manifest" and release.manifest:
            return answers.Body([release.manifest]), _OCTETS, "m"
        if what == "/raw":
            return release.raw(), _OCTETS, "r"
        if what == "/files":
            files = [{"path": name, "bytes": size} for name, size in release.files]
            return answers.Body([_json({"files": files})]), "application/json", "f"
        numbers = {name: number for number, (name, _) in enumerate(release.files)}
        number = numbers[what.removeprefix("/files/")]
        return release.file(number), _OCTETS, f"f{number}"

    def _archive(self, release: Release) -> answers.Body:
        archive = self._reader(release).archive
        if archive is None:
            raise KeyError(release.version)
        return archive[0]

    # What is here

    def _releases(self) -> Iterable[Release]:
        for version in self._library.versions:
            try:
                with self._library.borrow(version) as release:
                    yield release
            except KeyError:
                continue

    def _contents(self) -> bytes:
        rows = [
            {
                "version": release.version,
                "digest": release.digest.hex(),
                "files": len(release.files),
                "bytes": sum(size for _, size in release.files),
            }
            for release in self._releases()
        ]
        return _json({"versions": rows})

    def _page(self) -> bytes:
        """Return the list of versions as a page for people, with a link to each file."""
        parts = []
        for release in sorted(self._releases(), key=lambda one: -one.version):
            rows, base = [], f"/v/{release.version}"
            for name, size in release.files:
                where = f"{base}/files/{quote(name)}" if name else f"{base}/raw"
                rows.append(
                    f'<tr><td><a href="{where}" download>{escape(name or "the file")}</a></td>'
                    f"<td>{size:,}</td></tr>"
                )
            whole = sum(size for _, size in release.files)
            parts.append(
                f"<h1>Version {release.version}</h1><p>{len(rows)} files, {whole:,} bytes; <a"
                f' href="{base}.tar" download>all as one archive</a></p>'
                f"<table><tr><th>file<th>bytes{''.join(rows)}</table>"
            )
        return (_PAGE + ("".join(parts) or "<h1>No version is here yet</h1>")).encode()

    def _listing(self) -> bytes:
        return answers.encode_listing(
            answers.Listed(release.version, digest, answers.shard_count(body.size))
            for release in self._releases()
            if not (reader := self._reader(release)).is_changed and reader.archive is not None
            for body, digest in [reader.archive]
        )


class Reply:
    """Sends the answer to one request."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._begun = False
        self.has_body = scope["method"] != "HEAD"
        self.headers: Mapping[str, str] = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        """Headers of the request."""
        self.is_ending = False
        """True if the last part is being sent."""

    async def begin(self, status: int, *headers: tuple[str, str]) -> None:
        self._begun = True
        headers = ("x-content-type-options", "nosniff"), *headers
        said = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": said})

    async def part(self, data: bytes, *, more: bool = True) -> None:
        body = data if self.has_body else b""
        self.is_ending = not more
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def whole(self, status: int, data: bytes, *headers: tuple[str, str]) -> None:
        await self.begin(status, ("content-length", str(len(data))), *headers)
        await self.part(data, more=False)


_Kind = TypeVar("_Kind", bound=Reply)


async def answer_http(
    kind: type[_Kind],
    answer: Callable[[_Kind], Awaitable[None]],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answer one ASGI 3 request, of HTTP only; a websocket is refused. Throw away what else the
    client sends, and stop when it is gone.

    hypercorn says ``http.disconnect`` also while it takes the last part of an answer, and has
    still to end the connection then, or to begin its idle time: so a reply that is ending is
    not cancelled.

    hypercorn's queue to the application is bounded, and what ends a connection goes through it
    too: a body that is never read would hold the connection for ever.
    """
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1003})
    if scope["type"] != "http":
        return
    reply = kind(scope, send)

    async def read_to_end() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not reply.is_ending:
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_to_end)
        await answer(reply)
        nursery.cancel_scope.cancel()


def _is_meant(scope: Scope, host: str) -> bool:
    """Return True if the Host header names this server, so that no other site led the client
    here.

    On loopback the Host header must name this machine (`p2p.shardcast.http.core.answers`).
    Elsewhere any name will do, since caches and proxies have names of their own, and no answer
    allows other origins to read it (CORS).
    """
    server = scope.get("server")
    if server is None or not answers.is_loopback(server[0]) or not host:
        return True  # browsers always say a host
    name = answers.machine_named(host)
    return name is not None and answers.is_loopback(name)


def _version_of(path: str) -> PolicyVersion | None:
    """Return the version in ``v/7/...`` or ``v/7.tar``."""
    _, _, rest = path.partition("v/")
    number = rest.partition("/")[0].removesuffix(".tar")
    if not path.startswith("v/") or not (number.isascii() and number.isdigit()):
        return None
    return PolicyVersion(int(number)) if len(number) <= 10 else None


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


class _Reply(Reply):
    async def text(self, data: bytes, media: str, *headers: tuple[str, str]) -> None:
        """Send a short answer that may not be cached."""
        kept = ("cache-control", NEVER), ("vary", "accept")
        await self.whole(200, data, ("content-type", media), *kept, *headers)

    async def refuse(self, status: int, reason: str, *headers: tuple[str, str]) -> None:
        """Send an error status with a sentence for the client."""
        kept = ("content-type", "text/plain; charset=utf-8"), ("cache-control", NEVER)
        await self.whole(status, f"{reason}\n".encode(), *kept, *headers)

    async def fail(self, status: int, reason: str) -> None:
        """Report that the body cannot be read. If the head is out already, end the body before
        its length, so that the client sees a broken download."""
        if not self._begun:
            await self.refuse(status, reason)

    async def body(self, body: answers.Body, media: str, tag: str, reader: Reader) -> None:
        """Send the requested body or range, or tell the client that it has it already.

        Raises:
            FileChanged: A file differs from what was published.
            StorageError: The disk cannot be read.
        """
        size = body.size
        # A year is the longest that caches honour.
        forever = ("cache-control", "public, max-age=31536000, immutable")
        said = (("etag", tag), forever, ("accept-ranges", "bytes"))
        if answers.has_tag_untrusted(self.headers.get("if-none-match", ""), tag):
            await self.begin(304, *said)
            await self.part(b"", more=False)
            return
        # If-Range with another tag asks for the whole body (RFC 9110, 13.1.5).
        asked, part = self.headers.get("range", ""), None
        if asked and self.headers.get("if-range", tag) == tag:
            part = answers.parse_range_untrusted(asked, size)
        if part is not None and not part:
            where = ("content-range", f"bytes */{size}")
            await self.refuse(416, f"there are {size} bytes", where)
            return
        kind = ("content-type", media)
        span = part or range(size)
        pieces = list(reader.cut(body, span.start, span.stop))
        await reader.check(pieces)
        data = await reader.read(pieces[0]) if pieces and self.has_body else b""
        if part is None:
            await self.begin(200, ("content-length", str(size)), kind, *said)
        else:
            where = ("content-range", f"bytes {part.start}-{part.stop - 1}/{size}")
            length = ("content-length", str(len(part)))
            await self.begin(206, length, kind, where, *said)
        for number in range(len(pieces) if self.has_body else 0):
            data = data if number == 0 else await reader.read(pieces[number])
            for at in range(0, len(data), PIECE):
                await self.part(data[at : at + PIECE])
        await self.part(b"", more=False)
