"""The switch that adds delay between shaped lines: its queues, and real machines on it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio

from sim.net.link import LinkSpec
from sim.studies.lab.machines import EmulationConfig, open_emulation
from sim.studies.lab.namespaces import reason_to_skip
from sim.studies.lab.switch import VNET_HEADER, Downlink, wire_bytes


def test_a_large_frame_counts_as_the_packets_that_it_would_be() -> None:
    plain = VNET_HEADER.pack(0, 0, 0, 0, 0, 0) + bytes(1514)
    assert wire_bytes(plain) == 1514
    large = VNET_HEADER.pack(1, 1, 66, 1448, 34, 16) + bytes(66 + 3 * 1448 + 1)
    assert wire_bytes(large) == 4 * 66 + 3 * 1448 + 1


def test_bytes_wait_for_those_before_them_and_find_a_full_queue_full() -> None:
    line = Downlink()
    line.shape(1000.0)
    assert line.queue(1.0, 100, 0.11) == pytest.approx(1.1)
    assert line.queue(1.0, 100, 0.11) == pytest.approx(1.2)
    assert line.queue(1.0, 100, 0.11) is None
    assert line.queue(1.15, 100, 0.11) == pytest.approx(1.3)
    assert line.queue(9.0, 100, 0.11) == pytest.approx(9.1)


LISTENER = """
import json, socket
server = socket.create_server(("", 5000))
print(json.dumps({"up": 1}), flush=True)
while True:
    stream, _ = server.accept()
    while stream.recv(65536):
        pass
    stream.send(b"!")
"""
SENDER = """
import json, socket, sys, time
began = time.perf_counter()
stream = socket.create_connection((sys.argv[1], 5000))
connected = time.perf_counter() - began
stream.sendall(bytes(200_000))
stream.shutdown(socket.SHUT_WR)
stream.recv(1)
print(json.dumps({"connected": connected, "whole": time.perf_counter() - began}), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(reason_to_skip() is not None, reason=reason_to_skip() or "")
@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="the kernel has no TAP devices")
async def test_real_machines_are_as_far_apart_and_their_lines_as_narrow_as_they_should_be() -> (
    None
):
    """Two round trips of 0.1 s each, and 200,000 bytes at 8 Mbit/s."""
    hear, reports = trio.open_memory_channel[dict](4)
    link = LinkSpec(up=8.0, down=8.0)
    with trio.fail_after(60):
        async with open_emulation(EmulationConfig(delay=0.05)) as emulation:
            near, far = [await emulation.add(name, link, lambda _: None) for name in "ab"]
            await near.start([sys.executable, "-c", LISTENER], hear.send_nowait)
            await reports.receive()
            await far.start([sys.executable, "-c", SENDER, near.address], hear.send_nowait)
            took = await reports.receive()
            sent = await emulation.sent_bytes()
    assert took["connected"] >= 0.099
    assert took["whole"] >= 0.099 * 2 + 0.2
    assert 200_000 < sent["b"] < 260_000
    assert sent["a"] < 40_000
