"""The HTTP edge over real sockets: files that change, and hostile clients."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
import trio

from p2p.shardcast.http.server import EdgeConfig
from tests.e2e.http_world import SPAN, edge_of, get, shelf_of

WEIGHTS = bytes(range(251)) * 20_000
FOLDER = {"config.json": b"{}", "sub/model.safetensors": WEIGHTS, "empty": b""}


async def test_a_version_is_listed_and_its_files_are_what_they_were(tmp_path: Path) -> None:
    async with edge_of(tmp_path, shelf_of(tmp_path, {"a": b"old"}, FOLDER)) as port:
        status, _, body = await get(port, "/")
        versions = json.loads(body)["versions"]
        assert (status, [v["version"] for v in versions]) == (200, [2, 1])
        assert versions[0]["bytes"] == len(WEIGHTS) + 2
        files = json.loads((await get(port, "/v/2/files"))[2])["files"]
        assert [f["path"] for f in files] == list(FOLDER)
        for name, data in FOLDER.items():
            assert (await get(port, f"/v/2/files/{name}"))[2] == data
        assert (await get(port, "/v/2/raw"))[2] == b"{}" + WEIGHTS
        assert (await get(port, "/v/2/manifest"))[2] == b"the manifest"
        status, headers, _ = await get(port, "/latest/files/config.json")
        assert (status, headers["location"]) == (307, "/v/2/files/config.json")
        archive = (await get(port, "/v/2.tar"))[2]
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            assert tar.getnames() == list(FOLDER)


async def test_parts_tags_and_heads(tmp_path: Path) -> None:
    async with edge_of(tmp_path, shelf_of(tmp_path, {"w": WEIGHTS})) as port:
        status, headers, body = await get(port, "/v/1/raw", "Range: bytes=100-199")
        assert (status, body) == (206, WEIGHTS[100:200])
        assert headers["content-range"] == f"bytes 100-199/{len(WEIGHTS)}"
        tag = headers["etag"]
        assert "immutable" in headers["cache-control"]
        assert (await get(port, "/v/1/raw", f"If-None-Match: {tag}"))[0] == 304
        same = await get(port, "/v/1/raw", "Range: bytes=-5", f"If-Range: {tag}")
        assert (same[0], same[2]) == (206, WEIGHTS[-5:])
        assert (await get(port, "/v/1/raw", "Range: bytes=-5", 'If-Range: "x"'))[0] == 200
        status, headers, _ = await get(port, "/v/1/raw", "Range: bytes=99999999-")
        assert (status, headers["content-range"]) == (416, f"bytes */{len(WEIGHTS)}")
        status, headers, body = await get(port, "/v/1/raw", method="HEAD")
        assert (status, headers["content-length"], body) == (200, str(len(WEIGHTS)), b"")


NOT_HERE = (
    "/v/9/raw", "/v/1", "/v/1/files/../../secret", "/v/1/files//etc/passwd", "/v/x/raw",
    "/v/1/files/%2e%2e/%2e%2e/secret", "/v/1/raw/", "/v1/shard_00002.bin", "/v/1.tar/x",
    "/v/" + "9" * 400, "/nothing", "/v/1/files/",
)  # fmt: skip


async def test_what_is_not_here_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"a key")
    async with edge_of(tmp_path, shelf_of(tmp_path, {"w": b"weights"})) as port:
        for path in NOT_HERE:
            status, _, body = await get(port, path)
            assert (status, b"a key" in body) == (404, False), path


async def test_curl_resumes_where_it_stopped(tmp_path: Path) -> None:
    part = tmp_path / "part.bin"
    part.write_bytes(WEIGHTS[:1_234_567])
    async with edge_of(tmp_path, shelf_of(tmp_path, {"w": WEIGHTS})) as port:
        address = f"http://127.0.0.1:{port}/v/1/files/w"
        line = ["curl", "-sS", "-C", "-", "-o", str(part), "-w", "%{size_download}", address]
        try:
            done = await trio.run_process(line, capture_stdout=True)
        except FileNotFoundError:
            pytest.skip("curl is not installed")
        assert int(done.stdout) == len(WEIGHTS) - 1_234_567
    assert part.read_bytes() == WEIGHTS


# Hostile clients


async def asks(port: int) -> bool:
    """Whether an honest client gets an answer at once."""
    with trio.move_on_after(2), suppress(trio.BrokenResourceError, EOFError):
        return (await get(port, "/data1.bin"))[0] == 200
    return False  # refused, or closed without a word


async def test_a_long_body_is_not_waited_for(tmp_path: Path) -> None:
    async with edge_of(tmp_path, shelf_of(tmp_path, {"w": WEIGHTS})) as port:
        for method in ("POST", "GET", "PUT"):
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            async with stream:
                head = f"{method} / HTTP/1.1\r\nHost: localhost\r\n"
                head += "Content-Length: 9999999999\r\n\r\n"
                await stream.send_all(head.encode())
                with trio.fail_after(60):
                    try:
                        for _ in range(1000):
                            await stream.send_all(bytes(65536))
                    except trio.BrokenResourceError:
                        pass  # it was answered, and the connection closed
                    else:
                        pytest.fail("64 MB of a body that is not wanted were taken")
        assert await asks(port)


@pytest.mark.parametrize(
    ("said", "config"),
    [
        # it does not read the answer
        (b"GET /v/1/raw HTTP/1.1\r\nHost: localhost\r\n\r\n", {"stalled": 0.3}),
        (b"GET / HTTP/1.1\r\nX-Slow: ", {"idle": 0.3}),
    ],
    ids=["unread", "unfinished"],
)
async def test_a_slow_client_is_given_up(
    tmp_path: Path, said: bytes, config: dict[str, float]
) -> None:
    limits = EdgeConfig(connections=2, **config)
    async with edge_of(tmp_path, shelf_of(tmp_path, {"w": WEIGHTS * 4}), limits) as port:
        slow = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(2)]
        for stream in slow:
            await stream.send_all(said)
        with trio.fail_after(10):
            while not await asks(port):
                await trio.lowlevel.checkpoint()
        for stream in slow:
            await stream.aclose()


async def test_nonsense_costs_its_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = b" HTTP/1.1\r\nHost: localhost\r\n"
    nonsense = [
        b"\0" * 1000,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff\xfe" + host + b"\r\n",
        b"GET /" + host + b"Host: y\r\n\r\n",
        b"GET " + b"/a" * 20000 + host + b"\r\n",
        b"GET http:///:x" + host + b"\r\n",
        b"GET *" + host + b"\r\n",
        b"CONNECT a:1" + host + b"\r\n",
        b"GET /" + host + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + host + b"Content-Length: -1\r\n\r\n",
        b"GET /" + host + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        (b"GET /v/1/raw" + host + b"Range: bytes=0-0\r\n\r\n") * 300,
    ]
    async with edge_of(tmp_path, shelf_of(tmp_path, {"w": b"w"})) as port:
        for data in nonsense:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            async with stream:
                with trio.move_on_after(0.3):
                    await stream.send_all(data)
                    await stream.send_eof()
                    while await stream.receive_some():
                        pass
            assert await asks(port), data[:40]
    assert "http_connection_failed" not in caplog.text


def test_the_edge_is_imported_only_where_it_is_used() -> None:
    code = "import p2p, p2p.node, sys; print({'hypercorn', 'aiohttp'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"set()\n"


FILES = {
    "a.bin": Random(1).randbytes(2 * SPAN + 5),
    "b.json": b"{}" * 40,
    "sub/c.bin": Random(2).randbytes(SPAN),
}
SIZE = len(FILES["a.bin"])


def overwritten(place: int, *, quietly: bool = False) -> Callable[[Path], None]:
    """One byte is another. Quietly: the file's time is what it was."""

    def change(path: Path) -> None:
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([FILES["a.bin"][place] ^ 1]))
        times = before.st_atime_ns, before.st_mtime_ns + (0 if quietly else 10**9)
        os.utime(path, ns=times)

    return change


def replaced(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(bytes(SIZE))
    new.replace(path)


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def folder_there(path: Path) -> None:
    path.unlink()
    (path / "a.bin").mkdir(parents=True)


CHANGES: dict[str, Callable[[Path], None]] = {
    "first byte": overwritten(0),
    "middle": overwritten(SPAN + 1),
    "last byte": overwritten(SIZE - 1),
    "first byte quietly": overwritten(0, quietly=True),
    "last byte quietly": overwritten(SIZE - 1, quietly=True),
    "shorter": lambda path: os.truncate(path, SIZE - 1),
    "empty": lambda path: os.truncate(path, 0),
    "longer": longer,
    "removed": Path.unlink,
    "replaced": replaced,
    "folder": folder_there,
}
ASKED = {
    "/v/1/files/a.bin": FILES["a.bin"],
    "/v/1/files/b.json": FILES["b.json"],
    "/v/1/files/sub/c.bin": FILES["sub/c.bin"],
    "/v/1/raw": b"".join(FILES.values()),
}
TAKEN = {path for path in ASKED if path.endswith(("a.bin", "raw"))} | {"/v/1.tar"}
"""What holds the file that changes."""
RANGES = ["", "Range: bytes=0-9", "Range: bytes=-9", f"Range: bytes={SPAN - 5}-{SPAN + 5}"]


def part(whole: bytes, header: str) -> bytes:
    first, _, last = header.partition("=")[2].partition("-")
    if not header:
        return whole
    return whole[int(first) : int(last) + 1] if first else whole[-int(last) :]


@pytest.mark.parametrize("change", CHANGES)
async def test_no_byte_is_sent_that_was_not_published(change: str, tmp_path: Path) -> None:
    async with edge_of(tmp_path, shelf_of(tmp_path, FILES)) as port:
        CHANGES[change](tmp_path / "1" / "a.bin")
        for path, whole in ASKED.items():
            for header in RANGES:
                wanted = part(whole, header)
                status, headers, body = await get(port, path, *filter(None, [header]))
                if not wanted:
                    assert status == 416
                elif status == 410:
                    assert path in TAKEN
                    assert body == b"a.bin changed since it was published\n"
                    assert headers["cache-control"] == "no-cache"
                elif path in TAKEN and len(body) < int(headers["content-length"]):
                    assert wanted.startswith(body), "a broken download of what was published"
                else:
                    assert (status, body) == (206 if header else 200, wanted)
        if "quietly" not in change:
            for path in TAKEN:
                for method in ("GET", "HEAD"):
                    assert (await get(port, path, method=method))[0] == 410, (path, method)
            tag = await get(port, "/v/1/files/b.json")
            assert tag[0] == 200
        listing = await get(port, "/distribution.txt")
        assert listing[2] == b"", "shardcast's clients go elsewhere"


@pytest.mark.parametrize("back", [False, True])
async def test_what_is_right_is_given_whatever_its_time(tmp_path: Path, *, back: bool) -> None:
    path = tmp_path / "1" / "a.bin"
    async with edge_of(tmp_path, shelf_of(tmp_path, FILES)) as port:
        if back:
            longer(path)
            assert (await get(port, "/v/1/raw"))[0] == 410
        path.write_bytes(FILES["a.bin"])
        os.utime(path)
        for asked, whole in ASKED.items():
            assert (await get(port, asked))[::2] == (200, whole)
        assert (await get(port, "/distribution.txt"))[2].count(b"\n") == 1


async def test_a_file_that_changes_while_it_is_sent_breaks_the_download(tmp_path: Path) -> None:
    async with edge_of(tmp_path, shelf_of(tmp_path, FILES)) as port:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            await stream.send_all(b"GET /v/1/files/a.bin HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = bytes(await stream.receive_some(1000))
            overwritten(SIZE - 1)(tmp_path / "1" / "a.bin")
            while data := await stream.receive_some():
                answer += bytes(data)
        body = answer.partition(b"\r\n\r\n")[2]
        assert FILES["a.bin"].startswith(body)
