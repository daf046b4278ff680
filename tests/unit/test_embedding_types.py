"""What an embedder writes with plain text passes ``mypy --strict``, and works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

PROGRAM = """
import trio

import p2p

ECHO = "/example/echo/1.0.0"


async def echo(stream: p2p.Stream) -> None:
    async for data in stream:
        await stream.send_all(data)


async def main() -> None:
    async with p2p.open_world() as world, p2p.open_host(world=world) as bob:
        bob.set_handler(ECHO, echo)
        async with p2p.open_host() as alice, p2p.open_dht(world, bob) as dht:
            text = str(bob.addrs[0])
            peer = await alice.connect_addr(text)
            async with await alice.open_stream(peer, ECHO) as stream:
                await stream.send_all(b"hello")
                print((await stream.receive_some()).decode(), await dht.bootstrap([text]))


trio.run(main)
"""


def test_text_is_taken_for_protocols_and_addresses(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    for command in (["-m", "mypy", "--strict", str(path)], ["-W", "error", str(path)]):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "hello 0\n"


def test_under_asyncio_one_sentence_says_trio() -> None:
    """In a process of its own: trio-asyncio, once imported, replaces asyncio's loops."""
    program = (
        "import asyncio, p2p\n"
        "async def main():\n    async with p2p.open_host():\n        pass\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "ConfigError: Shoal runs on trio: start with trio.run(main)" in last
