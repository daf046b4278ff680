"""The edge gives what was published, or says that it is gone: whatever happens to the files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import trio

from tests.e2e.http_world import SPAN, edge_of, get, shelf_of

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
        assert (await get(port, "/distribution.txt"))[2] == b"", (
            "shardcast's clients go elsewhere"
        )


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
