"""The PyPI package shardcast 0.3.2, unmodified: its clients take from us, and we from it."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest
import trio

from p2p.cast.pull_http import open_origins
from p2p.shardcast.http.app import HttpEdge
from p2p.shardcast.http.library import Release, Shelf
from p2p.shardcast.http.server import serve_http
from tests.e2e.http_world import edge_of, shelf_of, world_at

pytest.importorskip("shardcast", reason="PyPI's shardcast is not installed")
if shutil.which("wget") is None:
    pytest.skip("shardcast fetches with wget, which is not installed", allow_module_level=True)

pytestmark = pytest.mark.interop

DATA = bytes(range(253)) * 9_000
SHARD = 700_000

ORIGIN = """
import pathlib, sys, time
from shardcast.origin_server import OriginServer
folder, port, weights, shard = sys.argv[1:]
origin = OriginServer(folder, int(port))
pathlib.Path(folder, "data1.bin").write_bytes(bytes(1000))  # its clients want one
origin.broadcast(weights, shard_size=int(shard))
print("up", flush=True)
time.sleep(300)
"""
MIDDLE = """
import pathlib, sys, time
from shardcast.middle_node import MiddleNode
folder, port, upstream = sys.argv[1:]
pathlib.Path(folder).mkdir()
pathlib.Path(folder, "data1.bin").write_bytes(bytes(1000))
MiddleNode([upstream], folder, int(port), check_interval=1)
print("up", flush=True)
time.sleep(300)
"""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@asynccontextmanager
async def running(code: str, *arguments: str) -> AsyncIterator[None]:
    """A program of theirs that says when it is up; killed at the end of the block."""
    line = [sys.executable, "-c", code, *arguments]
    async with trio.open_nursery() as nursery:
        process: trio.Process = await nursery.start(
            partial(trio.run_process, line, stdout=PIPE, stderr=DEVNULL, check=False)
        )
        assert process.stdout is not None
        with trio.fail_after(60):
            said = b""
            while b"up" not in said:
                said += await process.stdout.receive_some()
        yield
        process.kill()


@asynccontextmanager
async def followed(folder: Path, upstream: str) -> AsyncIterator[tuple[Release, str]]:
    """What we took from ``upstream``, and the address at which we offer it again."""
    world, shelf = world_at(folder), Shelf()
    async with open_origins(world, [upstream], "followed") as origins:
        with trio.fail_after(60):
            release = await origins.wait_newer()
    shelf.add(release)
    async with serve_http(HttpEdge(world, shelf), "127.0.0.1", 0) as [(host, port)]:
        yield release, f"http://{host}:{port}"


async def fetched_by_their_client(folder: Path, servers: Sequence[str], version: str) -> bytes:
    out = folder / "fetched.bin"
    line = [
        sys.executable, "-m", "shardcast.client_node", "--servers", ",".join(servers),
        "--version", version, "--output-dir", str(folder / "s"), "--output-file", str(out),
    ]  # fmt: skip
    with trio.fail_after(60):
        await trio.run_process(line, capture_stdout=True, capture_stderr=True)
    return out.read_bytes()


async def test_their_client_fetches_from_us(tmp_path: Path) -> None:
    async with edge_of(tmp_path, shelf_of(tmp_path, {"w": b"old"}, {"w": DATA})) as port:
        servers = [f"http://127.0.0.1:{port}"]
        assert await fetched_by_their_client(tmp_path, servers, "v2") == DATA


async def test_a_tree_of_theirs_and_ours_by_turns_delivers(tmp_path: Path) -> None:
    """Their origin, our node, their middle node, our node, their client."""
    weights = tmp_path / "weights"
    weights.write_bytes(DATA)
    async with AsyncExitStack() as stack:
        ports = [free_port(), free_port()]
        await stack.enter_async_context(
            running(ORIGIN, str(tmp_path / "origin"), str(ports[0]), str(weights), str(SHARD))
        )
        first, address = await stack.enter_async_context(
            followed(tmp_path / "first", f"http://127.0.0.1:{ports[0]}")
        )
        assert (tmp_path / "first" / first.paths[0]).read_bytes() == DATA
        await stack.enter_async_context(
            running(MIDDLE, str(tmp_path / "middle"), str(ports[1]), address)
        )
        second, address = await stack.enter_async_context(
            followed(tmp_path / "second", f"http://127.0.0.1:{ports[1]}")
        )
        assert (tmp_path / "second" / second.paths[0]).read_bytes() == DATA
        assert await fetched_by_their_client(tmp_path, [address], "v1") == DATA
