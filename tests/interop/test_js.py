"""js-libp2p on the other side of the wire. ``make interop`` installs it; without it these tests
skip.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

import p2p
from p2p.host import Stream
from p2p.wire import MIB

JS = Path(__file__).parent / "js"
ECHO = p2p.ProtocolId("/shoal/interop/echo/1.0.0")
PATIENCE = 90
"""Seconds; node takes 5 to start on a loaded machine."""

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(
        shutil.which("node") is None or not (JS / "node_modules").is_dir(),
        reason="js-libp2p not installed: run make interop",
    ),
]


def command(*args: str) -> list[str]:
    return ["node", "--import", "./poly.mjs", "node.mjs", *args]


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)


@asynccontextmanager
async def js_node() -> AsyncIterator[p2p.Multiaddr]:
    """A js-libp2p node that echoes, and where it listens."""
    async with trio.open_nursery() as nursery:
        run = partial(
            trio.run_process,
            command("listen"),
            cwd=JS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        process = await nursery.start(partial(run, capture_stdout=False))
        line = bytearray()
        while not line.endswith(b"\n"):
            line += await process.stdout.receive_some()
        yield p2p.Multiaddr.parse(json.loads(line)["addr"])
        await process.stdin.aclose()


async def test_js_dials_us() -> None:
    with trio.fail_after(PATIENCE):
        async with p2p.open_host(strict=True) as host:
            host.set_handler(ECHO, echo)
            done = await trio.run_process(
                command("dial", str(host.addrs[0])), cwd=JS, capture_stdout=True
            )
            said: dict[str, object] = {}
            for line in done.stdout.splitlines():
                said |= json.loads(line)
            assert said["connected"] == str(host.peer_id)
            assert said["echo"] is True
            assert isinstance(said["ping"], int)
            told = said["identify"]
            assert isinstance(told, dict)
            assert told["agent"].startswith("shoal/")
            assert str(ECHO) in told["protocols"]
            assert told["listen"] == [str(host.addrs[0].transport)]
            assert told["observed"].startswith("/ip4/127.0.0.1/tcp/")


async def test_we_dial_js() -> None:
    with trio.fail_after(PATIENCE):
        async with p2p.open_host(strict=True) as host, js_node() as addr:
            peer = await host.connect_addr(addr)
            assert await p2p.ping(host, peer) < PATIENCE
            for _ in range(2):  # the second stream negotiates lazily
                await _echo_16_mib(host, peer)
            info = host.info(peer)
            assert info is not None
            assert info.agent.startswith("js-libp2p/")
            assert info.observed_addr is not None
            with pytest.raises(p2p.ProtocolNotSupported):
                await host.open_stream(peer, p2p.ProtocolId("/shoal/nobody/1.0.0"))


async def _echo_16_mib(host: p2p.SwarmHost, peer: p2p.PeerId) -> None:
    sent = bytes(range(256)) * (16 * MIB // 256)
    received = bytearray()
    async with await host.open_stream(peer, ECHO) as stream, trio.open_nursery() as nursery:

        async def send() -> None:
            await stream.send_all(sent)
            await stream.send_eof()

        nursery.start_soon(send)
        while data := await stream.receive_some():
            received += data
    assert received == sent


def test_the_example_has_a_topic_with_js(tmp_path: Path) -> None:
    """docs/cookbook/pubsub.md: each side hears the other, by gossipsub 1.1."""
    examples = JS.parent.parent.parent / "examples"
    (tmp_path / "node_modules").symlink_to(JS / "node_modules")
    for source in (examples / "topic.mjs", JS / "poly.mjs"):
        shutil.copy(source, tmp_path)
    ours = [sys.executable, "-W", "error", str(examples / "topic.py"), "alice"]
    env = os.environ | {"PYTHONPATH": str(examples.parent)}
    with ExitStack() as ended:

        def start(*command: str) -> Callable[[], str]:
            process = subprocess.Popen(
                command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
            )
            ended.callback(process.communicate)
            ended.callback(process.kill)
            watchdog = threading.Timer(PATIENCE, process.kill)
            ended.callback(watchdog.cancel)
            watchdog.start()
            assert process.stdout is not None
            return process.stdout.readline

        alice = start(*ours)
        js = start("node", "--import", "./poly.mjs", "topic.mjs", alice().split()[-1])
        assert js().endswith(" says fine, says alice\n")
        assert alice().endswith(" says rain, says js\n")
