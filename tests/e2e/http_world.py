"""A folder of files and an edge that serves it, for tests over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from p2p.identity import KeyPair
from p2p.machine import RealWorld
from p2p.shardcast.http.app import HttpEdge
from p2p.shardcast.http.library import Release, Shelf
from p2p.shardcast.http.server import EdgeConfig, serve_http
from p2p.shardcast.index import Index, PolicyFile, Span, digest_of
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import MIB

SPAN = 3 * MIB  # two spans are more than the edge reads at once


def world_at(folder: Path) -> RealWorld:
    return RealWorld(KeyPair(bytes(32)), folder)


def shelf_of(folder: Path, *versions: dict[str, bytes]) -> Shelf:
    """A shelf whose first version is 1."""
    shelf = Shelf()
    for version, files in enumerate(versions, 1):
        for name, data in files.items():
            path = folder / str(version) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        shelf.add(
            Release(
                PolicyVersion(version),
                tuple((name, len(data)) for name, data in files.items()),
                bytes([version]) * 32,
                index_of(files),
                b"the manifest",
                tuple(f"{version}/{name}" for name in files),
            )
        )
    return shelf


def index_of(files: dict[str, bytes]) -> Index:
    return Index.of(
        [PolicyFile(name, len(data)) for name, data in files.items()],
        [
            Span(digest_of(data[at : at + SPAN]), len(data[at : at + SPAN]))
            for data in files.values()
            for at in range(0, len(data), SPAN)
        ],
    )


@asynccontextmanager
async def edge_of(
    folder: Path, shelf: Shelf, config: EdgeConfig | None = None
) -> AsyncIterator[int]:
    """The port of an edge on loopback that has listed its versions."""
    edge = HttpEdge(world_at(folder), shelf)
    async with serve_http(edge, "127.0.0.1", 0, config) as addresses:
        port = addresses[0][1]
        with trio.fail_after(10):
            while (await get(port, "/distribution.txt"))[2].count(b"\n") < len(shelf.versions):
                await trio.lowlevel.checkpoint()
        yield port


async def get(
    port: int, path: str, *headers: str, method: str = "GET", body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    """Ask once, on a connection of its own, and read to its end."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        await stream.send_all("\r\n".join([*lines, "", ""]).encode() + body)
        answer = b""
        while data := await stream.receive_some():
            answer += bytes(data)
    if not answer:
        raise EOFError
    return parsed(answer)


def parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, rest = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value for name, value in fields.items()}, rest
