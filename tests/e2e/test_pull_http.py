"""Taking versions from shardcast's servers, honest and hostile ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from blake3 import blake3

from p2p.cast.pull_http import Origins, OriginsFailed, open_origins
from p2p.errors import ConfigError
from p2p.machine import RealWorld
from p2p.shardcast.http.core.answers import MAX_SHARDS
from p2p.shardcast.http.server import serve_http
from tests.e2e.http_world import edge_of, shelf_of, world_at

DATA = bytes(range(253)) * 9_000
SHARDS = [DATA[at : at + 500_000] for at in range(0, len(DATA), 500_000)]
ORIGIN = {
    "distribution.txt": f"v3: {blake3(DATA).hexdigest()}|{len(SHARDS)}\n".encode(),
    **{f"v3/shard_{n:05d}.bin": shard for n, shard in enumerate(SHARDS, 1)},
}

Answer = bytes | Callable[[Any], Awaitable[None]]


class Server:
    """Answers each path with what it was given."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self.answers = answers

    async def keep_listing(self) -> None:
        """Nothing to keep."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self.answers.get(scope["path"].lstrip("/"))
        if callable(answer):
            await answer(send)
            return
        status = 404 if answer is None else 200
        head = {"type": "http.response.start", "status": status, "headers": []}
        await send(head)
        await send({"type": "http.response.body", "body": answer or b"", "more_body": False})


@asynccontextmanager
async def following(
    folder: Path, *servers: Mapping[str, Answer], silence: float = 5.0
) -> AsyncIterator[tuple[Origins, RealWorld]]:
    world = world_at(folder)
    async with AsyncExitStack() as stack:
        bases = []
        for answers in servers:
            server: Any = Server(answers)
            [(host, port), *_] = await stack.enter_async_context(
                serve_http(server, "127.0.0.1", 0)
            )
            bases.append(f"http://{host}:{port}/")
        opened = open_origins(world, bases, "followed", silence=silence)
        yield await stack.enter_async_context(opened), world


async def test_a_listed_version_becomes_one_file(tmp_path: Path) -> None:
    async with following(tmp_path, ORIGIN) as (origins, _):
        [entry] = await origins.listed()
        release = await origins.fetch(entry)
    assert (release.version, release.files) == (3, (("v3.bin", len(DATA)),))
    assert (tmp_path / release.paths[0]).read_bytes() == DATA


async def test_what_an_edge_serves_can_be_followed(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path, {"a": b"old"}, {"w": DATA, "x": b"config"})
    async with edge_of(tmp_path, shelf) as port:
        world = world_at(tmp_path)
        async with open_origins(world, [f"http://127.0.0.1:{port}"], "followed") as origins:
            release = await origins.wait_newer()
    assert release.version == 2
    assert (tmp_path / release.paths[0]).read_bytes()[1024 - 512 :].startswith(DATA[:100])


async def test_a_wrong_shard_of_one_server_is_found_and_the_other_taken(tmp_path: Path) -> None:
    liar = {**ORIGIN, "v3/shard_00002.bin": b"x" * 500_000}
    async with following(tmp_path, liar, ORIGIN, liar) as (origins, _):
        [entry] = await origins.listed()
        release = await origins.fetch(entry)
        assert (tmp_path / release.paths[0]).read_bytes() == DATA
    async with following(tmp_path, liar) as (origins, _):
        with pytest.raises(OriginsFailed):
            await origins.fetch(entry)


async def test_most_servers_are_believed_about_a_digest(tmp_path: Path) -> None:
    other = {**ORIGIN, "distribution.txt": f"v3: {'0' * 64}|1\n".encode()}
    async with following(tmp_path, other, ORIGIN, ORIGIN) as (origins, _):
        [entry] = await origins.listed()
        assert entry.digest == blake3(DATA).digest()


async def test_one_server_of_three_adds_no_version(tmp_path: Path) -> None:
    listing = b"v999999999: " + b"0" * 64 + b"|1\n" + ORIGIN["distribution.txt"]
    async with following(tmp_path, {**ORIGIN, "distribution.txt": listing}, ORIGIN, ORIGIN) as (
        origins,
        _,
    ):
        assert [entry.version for entry in await origins.listed()] == [3]


async def endless(send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(4000):
        await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})


async def silent(send: Any) -> None:
    await trio.sleep_forever()


async def drip(send: Any) -> None:
    """A byte now and then: never silent, never done."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": b"v", "more_body": True})
        await trio.sleep(0.02)  # noqa: TID251 - over real sockets


async def cut(send: Any) -> None:
    size = [(b"content-length", b"500000")]
    await send({"type": "http.response.start", "status": 200, "headers": size})
    await send({"type": "http.response.body", "body": bytes(1000), "more_body": True})


async def around(send: Any) -> None:
    to = [(b"location", b"/v3/shard_00002.bin"), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 302, "headers": to})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.mark.parametrize("answer", [endless, silent, drip, cut, around, b"", b"x" * 500_001])
async def test_a_shard_that_never_comes_whole_is_given_up(
    tmp_path: Path, answer: Answer
) -> None:
    bad = {**ORIGIN, "v3/shard_00002.bin": answer}
    async with following(tmp_path, bad, silence=0.3) as (origins, world):
        [entry] = await origins.listed()
        with trio.fail_after(20), pytest.raises(OriginsFailed):
            await origins.fetch(entry)
        assert await world.disk.list("followed") == []


@pytest.mark.parametrize("count", [1, 2, len(SHARDS) + 1, MAX_SHARDS])
async def test_a_wrong_count_of_shards_costs_no_more_than_the_shards(
    tmp_path: Path, count: int
) -> None:
    listing = f"v3: {blake3(DATA).hexdigest()}|{count}\n".encode()
    async with following(tmp_path, {**ORIGIN, "distribution.txt": listing}) as (origins, world):
        [entry] = await origins.listed()
        with trio.fail_after(20), pytest.raises(OriginsFailed):
            await origins.fetch(entry)
        assert await world.disk.list("followed") == []


@pytest.mark.parametrize("answer", [endless, drip, b"v1: junk", b"v1: " + b"0" * 100_000])
async def test_a_listing_that_cannot_be_is_its_servers_fault(
    tmp_path: Path, answer: Answer
) -> None:
    liar: dict[str, Answer] = {"distribution.txt": answer}
    async with following(tmp_path, liar, ORIGIN, silence=0.3) as (origins, _):
        with trio.fail_after(20):
            [entry] = await origins.listed()
        assert entry.version == 3
    async with following(tmp_path, liar, silence=0.3) as (origins, _):
        with trio.fail_after(20), pytest.raises(OriginsFailed, match=r"distribution\.txt"):
            await origins.listed()


async def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with open_origins(world_at(tmp_path), ["http://127.0.0.1:1"], "f") as origins:
        with pytest.raises(OriginsFailed, match=r"http://127\.0\.0\.1:1: Client"):
            await origins.listed()


@pytest.mark.parametrize(
    "base", ["", "localhost", "ftp://x", "http://", "http://[", "file:///"]
)
async def test_what_is_no_address_is_refused(tmp_path: Path, base: str) -> None:
    with pytest.raises(ConfigError):
        async with open_origins(world_at(tmp_path), [base], "f"):
            pass


async def test_a_server_that_fails_is_asked_once(tmp_path: Path) -> None:
    """Each shard asks another server first, and those that failed last."""
    asked: list[str] = []

    async def failing(send: Any) -> None:
        asked.append("failing")
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    bad = {path: failing for path in ORIGIN if path.startswith("v3/")}
    listing = {"distribution.txt": ORIGIN["distribution.txt"]}
    async with following(tmp_path, {**listing, **bad}, ORIGIN) as (origins, _):
        [entry] = await origins.listed()
        await origins.fetch(entry)
    assert len(asked) == 1
