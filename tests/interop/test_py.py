"""py-libp2p on the other side of the wire, in an environment of its own (it brings sixty
packages).

``python -m venv env && env/bin/pip install libp2p``, then ``PY_LIBP2P=env/bin/python pytest
tests/interop``.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import trio

import p2p
from p2p.host import Stream

NODE = Path(__file__).parent / "py_node.py"
PYTHON = os.environ.get("PY_LIBP2P", "")
ECHO = p2p.ProtocolId("/shoal/interop/echo/1.0.0")
PATIENCE = 60

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(
        not PYTHON, reason="py-libp2p not installed: set PY_LIBP2P to a Python that has it"
    ),
]


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)


async def test_py_dials_us() -> None:
    with trio.fail_after(PATIENCE):
        async with p2p.open_host() as host:
            host.set_handler(ECHO, echo)
            command = [PYTHON, str(NODE), "dial", str(host.addrs[0])]
            done = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
            assert [json.loads(line) for line in done.stdout.splitlines()] == [
                {"ping": True},
                {"echo": True},
            ]


async def test_we_dial_py() -> None:
    command = [PYTHON, str(NODE), "listen"]
    process = await trio.lowlevel.open_process(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        with trio.fail_after(PATIENCE):
            line = bytearray()
            while not line.endswith(b"\n"):
                line += await process.stdout.receive_some()
            async with p2p.open_host() as host:
                peer = await host.connect_addr(p2p.Multiaddr.parse(json.loads(line)["addr"]))
                assert await p2p.ping(host, peer) < PATIENCE
                await _echo_1_mib(host, peer)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()


async def _echo_1_mib(host: p2p.SwarmHost, peer: p2p.PeerId) -> None:
    sent, received = bytes(range(256)) * 4096, bytearray()
    async with await host.open_stream(peer, ECHO) as stream, trio.open_nursery() as nursery:
        nursery.start_soon(stream.send_all, sent)
        while len(received) < len(sent):
            data = await stream.receive_some()
            assert data
            received += data
    assert received == sent
