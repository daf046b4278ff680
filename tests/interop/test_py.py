"""py-libp2p on the other side of the wire, in an environment of its own (it brings sixty
packages). ``make interop`` makes it; without it these tests skip.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import p2p
from tests.support.foreign_nodes import (
    ECHO,
    LITTLE,
    circuit_of,
    echo,
    open_home,
    open_relay,
    talking,
    try_circuit,
    try_echo,
    until,
)

NODE = Path(__file__).parent / "py_node.py"
MADE = Path(__file__).parents[2] / "build" / "py-libp2p" / "bin" / "python"
PYTHON = os.environ.get("PY_LIBP2P") or str(MADE)
PATIENCE = 60

pytestmark = [
    pytest.mark.interop,
    pytest.mark.deep,
    pytest.mark.skipif(
        not Path(PYTHON).is_file(),
        reason="py-libp2p not installed: run make interop, or set PY_LIBP2P to a Python of it",
    ),
]


def command(*args: object) -> list[str]:
    return [PYTHON, str(NODE), *map(str, args)]


@asynccontextmanager
async def py_node(*args: object) -> AsyncIterator[p2p.Multiaddr]:
    """A py-libp2p node, and where it can be dialled."""
    async with talking(command(*args)) as next_line:
        yield p2p.Multiaddr.parse(json.loads(await next_line())["addr"])


async def test_py_dials_us() -> None:
    with trio.fail_after(PATIENCE):
        async with p2p.open_host() as host:
            host.set_handler(ECHO, echo)
            done = await trio.run_process(
                command("dial", host.addrs[0]), capture_stdout=True, capture_stderr=True
            )
            assert [json.loads(line) for line in done.stdout.splitlines()] == [
                {"ping": True},
                {"echo": True},
            ]


async def test_we_dial_py() -> None:
    with trio.fail_after(PATIENCE):
        async with py_node("listen") as addr, p2p.open_host() as host:
            peer = await host.connect_addr(addr)
            assert await p2p.ping(host, peer) < PATIENCE
            await try_echo(host, peer)


async def test_we_meet_through_a_relay_of_py() -> None:
    with trio.fail_after(PATIENCE):
        async with (
            py_node("relay") as relay,
            open_home(relay) as home,
            p2p.open_host(strict=True) as guest,
        ):
            await try_circuit(guest, circuit_of(home))


async def test_we_dial_py_behind_our_relay_and_punch() -> None:
    """py accepts the circuit: it begins the hole punch, as server."""
    with trio.fail_after(PATIENCE):
        async with (
            open_relay() as relay,
            py_node("listen", relay) as addr,
            p2p.open_host(strict=True, config=p2p.SwarmConfig(punch=True)) as guest,
        ):
            peer = await guest.connect_addr(addr)
            await try_echo(guest, peer, LITTLE)
            await until(guest, lambda: guest.is_direct(peer))
            await try_echo(guest, peer)


async def test_py_dials_us_behind_our_relay_and_we_punch() -> None:
    """We accept the circuit: we begin the hole punch, as server."""
    with trio.fail_after(PATIENCE):
        async with (
            open_relay() as relay,
            open_home(relay, punch=True) as home,
            talking(command("dial", circuit_of(home))) as next_line,
        ):
            said = [json.loads(await next_line()) for _ in range(3)]
            assert said == [{"echo": True}, {"echo": True}, {"direct": True}]
