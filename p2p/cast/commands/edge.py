"""The HTTP servers that stand beside a node.

hypercorn takes a third of a second to import, so this module is imported where one is asked
for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from p2p.cast.view import Teller
from p2p.shardcast.http.app import HttpEdge
from p2p.shardcast.http.library import Library
from p2p.shardcast.http.server import serve_http
from p2p.world import World


@asynccontextmanager
async def serving(
    world: World,
    library: Library,
    address: tuple[str, int],
    teller: Teller,
    on_changed: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[None]:
    """Offer a library over HTTP for the length of the block, and say where. ``on_changed`` is
    told the name of a file that is not what was published."""
    async with serve_http(HttpEdge(world, library, on_changed), *address) as places:
        urls = [f"http://[{h}]:{p}/" if ":" in h else f"http://{h}:{p}/" for h, p in places]
        teller.event("http", "\n".join(f"http     {url}" for url in urls), urls=urls)
        yield
