"""Fetching over HTTP from several servers that hold the same: the better one, more often.

aiohttp does the talking, on an asyncio loop that trio-asyncio runs inside trio. A server is
chosen at random in proportion to success x rate, both smoothed, as shardcast 0.3.2 does; unlike
there, a failure counts no bytes (shardcast books its 30 s timeout as 30 MB/s, so that a dead
server keeps attracting requests), and no weight falls to 0 (there, all at 0 ends the client).

Servers are an operator's choice, and are not believed: what they send is bounded here, and its
digest is the caller's to check (`Mirrors.blame`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Final
from urllib.parse import quote, urlsplit

import aiohttp
import trio
import trio_asyncio

from p2p.errors import BadMessage, ConfigError, ShoalError
from p2p.shardcast.http.core.ranges import parse_content_range_untrusted
from p2p.shardcast.http.library import PIECE
from p2p.wire import KI
from p2p.world import World

_SMOOTHING: Final = 0.3
"""Weight of the newest request in success and rate: shardcast's own. After three failures in a
row a server has a third of its weight, after ten 3 %."""
_LEAST: Final = 0.02
"""Least success that is reckoned with: a server that came back is noticed within some fifty
requests."""
_RATE_AT_FIRST: Final = 1e6
"""Bytes per second ascribed to a server while none has been measured: only ratios matter."""
_MAX_REDIRECTS: Final = 3
"""Object stores answer a presigned address with one redirection at most; chains are loops."""
_CONNECT: Final = 10.0
"""Seconds for a connection, name and TLS included: five round trips of 300 ms and retries."""
_SILENCE: Final = 30.0
"""Seconds without a byte after which a download is given up for another server."""
LEAST_RATE: Final = 16 * KI
"""Bytes per second below which a download is given up, once it has taken as long as a silence
may. A server that sends a byte now and then is never silent, and would keep others from being
asked."""


class MirrorsFailed(ShoalError):
    """No server gave what was asked for; the message says what each answered last."""


@dataclass(slots=True)
class Mirror:
    """One server: its address and its record so far."""

    base: str
    """Its address; ``{path}`` stands for what is asked for (a presigned address needs that),
    else the path comes behind."""
    success: float = 1.0
    rate: float | None = None
    """Bytes per second, smoothed; None before the first."""
    trouble: str = ""
    """Its last failure, if the last answer was one."""

    def url(self, path: str) -> str:
        """Where ``path`` is."""
        if "{path}" in self.base:
            return self.base.replace("{path}", quote(path))
        return f"{self.base.rstrip('/')}/{quote(path)}"

    def note_success(self, rate: float) -> None:
        """A request was answered whole, at ``rate`` bytes per second."""
        self.success += _SMOOTHING * (1 - self.success)
        self.rate = rate if self.rate is None else self.rate + _SMOOTHING * (rate - self.rate)
        self.trouble = ""

    def note_failure(self, trouble: str) -> None:
        """A request was not."""
        self.success -= _SMOOTHING * self.success
        self.trouble = trouble

    def note_lie(self, trouble: str) -> None:
        """It gave bytes that are not what they should be."""
        self.success, self.trouble = 0.0, trouble


def choose(mirrors: Sequence[Mirror], rng: Random) -> Mirror:
    """Pick one of ``mirrors``, with a probability proportional to success x rate."""
    known = [mirror.rate for mirror in mirrors if mirror.rate is not None]
    usual = sum(known) / len(known) if known else _RATE_AT_FIRST
    weights = [
        max(mirror.success, _LEAST) * (usual if mirror.rate is None else max(mirror.rate, 1.0))
        for mirror in mirrors
    ]
    return rng.choices(mirrors, weights)[0]


class Mirrors:
    """Servers that hold the same things under the same paths."""

    def __init__(
        self, world: World, bases: Sequence[str], session: Any, silence: float = _SILENCE
    ) -> None:
        self.all = tuple(Mirror(base) for base in bases)
        self._silence = silence
        self._world = world
        self._rng = world.rng("mirrors")
        self._session = session

    async def fetch(
        self, path: str, most: int, *, among: Sequence[Mirror] | None = None
    ) -> bytes:
        """All of a short thing of at most ``most`` bytes. Raises `MirrorsFailed`."""
        parts: list[bytes] = []

        async def keep(offset: int, data: bytes) -> None:
            parts.append(data)

        await self.fetch_to(path, most, keep, restart=parts.clear, among=among)
        return b"".join(parts)

    async def fetch_to(
        self,
        path: str,
        most: int,
        keep: Callable[[int, bytes], Any],
        *,
        start: int = 0,
        restart: Callable[[], object] = lambda: None,
        among: Sequence[Mirror] | None = None,
    ) -> int:
        """Hand what is at ``path``, from byte ``start`` on, to ``keep(offset, data)`` piece by
        piece; returns its bytes in all.

        Each server is tried until one gives it whole; ``restart`` is called before each. What
        is longer than ``most`` is refused. Raises `MirrorsFailed`, and what ``keep`` does.
        """
        left = list(among or self.all)
        while left:
            mirror = choose(left, self._rng)
            left.remove(mirror)
            restart()
            begun = self._world.now()
            try:
                count = await self._get(mirror, path, start, most, keep)
            except (aiohttp.ClientError, TimeoutError, BadMessage, ValueError) as error:
                mirror.note_failure(f"{type(error).__name__}: {error}"[:200])
                continue
            mirror.note_success(count / max(self._world.now() - begun, 1e-3))
            return count
        told = "; ".join(f"{m.base.split('?')[0]}: {m.trouble}" for m in among or self.all)
        raise MirrorsFailed(f"no server gave {path}: {told}")

    async def _get(
        self,
        mirror: Mirror,
        path: str,
        start: int,
        most: int,
        keep: Callable[[int, bytes], Any],
    ) -> int:
        begun = self._world.now()
        headers = {"Range": f"bytes={start}-"} if start else {}
        get = trio_asyncio.aio_as_trio(self._session.get)
        response = await get(mirror.url(path), headers=headers, max_redirects=_MAX_REDIRECTS)
        try:
            skip = _begins_at_untrusted(response, start)
            expected = response.content_length
            if expected is not None and expected - skip > most:
                raise BadMessage(f"{expected} bytes are more than {most}")
            read = trio_asyncio.aio_as_trio(response.content.read)
            count = came = 0
            while data := await read(PIECE):
                came += len(data)
                passed = self._world.now() - begun
                if passed > self._silence and came < LEAST_RATE * passed:
                    raise BadMessage(f"{came} bytes in {passed:.0f} s: it drips")
                fresh = data[skip:]
                skip -= len(data) - len(fresh)
                if count + len(fresh) > most:
                    raise BadMessage(f"more than {most} bytes")
                if fresh:
                    await keep(count, fresh)
                count += len(fresh)
        finally:
            response.close()  # of a body that was read to its end, the connection is kept
        return count


def _begins_at_untrusted(response: Any, start: int) -> int:
    """How many bytes of an answer are to be skipped, so that it begins at ``start``: a server
    may ignore ranges (shardcast 0.3.2 does). Raises `BadMessage`."""
    if response.status == 200:
        return start
    if response.status != 206 or not start:
        raise BadMessage(f"status {response.status}")
    part, _ = parse_content_range_untrusted(response.headers.get("Content-Range", ""))
    if part.start != start:
        raise BadMessage(f"bytes from {part.start} on, not from {start}")
    return 0


def check_base(base: str) -> str:
    """``base`` if a server can be there. Raises `ConfigError`."""
    with suppress(ValueError):
        parts = urlsplit(base)
        if parts.scheme in {"http", "https"} and parts.hostname:
            return base
    raise ConfigError(f"{base!r} is no http:// or https:// address")


@asynccontextmanager
async def open_mirrors(
    world: World, bases: Sequence[str], *, silence: float = _SILENCE
) -> AsyncIterator[Mirrors]:
    """Servers to fetch from, for the length of the block.

    A download that brings no byte for ``silence`` seconds is given up for another server.
    Raises `ConfigError` if one of ``bases`` is no address.
    """
    for base in bases:
        check_base(base)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=silence)
    async with trio_asyncio.open_loop():
        session = aiohttp.ClientSession(
            timeout=timeout,
            auto_decompress=False,  # digests are of what is stored; and no bombs
            headers={"Accept-Encoding": "identity"},
        )
        try:
            yield Mirrors(world, bases, session, silence)
        finally:
            with trio.CancelScope(shield=True):
                await trio_asyncio.aio_as_trio(session.close)()
