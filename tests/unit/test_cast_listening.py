"""At which ports a pusher listens that was run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from p2p.cast.commandline import listen_again
from p2p.errors import ConfigError
from p2p.machine import open_world
from p2p.multiaddr import Multiaddr
from p2p.swarm.swarm import open_host

ANY = Multiaddr.parse("/ip4/127.0.0.1/tcp/0")


async def ports_of_a_life(folder: Path, addrs: Sequence[Multiaddr], *taken: int) -> list[int]:
    """Where a push listens whose ports of before are free, but for ``taken``."""
    async with (
        open_world(folder) as world,
        open_host(world=world, listen=[]) as host,
    ):
        assert await listen_again(world, host, addrs) == list(taken)
        return [addr.host_port[1] for addr in host.addrs]


async def test_each_address_keeps_its_port(tmp_path: Path) -> None:
    first = await ports_of_a_life(tmp_path, [ANY, ANY])
    assert len(set(first)) == 2
    assert await ports_of_a_life(tmp_path, [ANY, ANY]) == first
    assert await ports_of_a_life(tmp_path, [ANY]) == first[:1]


async def test_a_name_keeps_its_port(tmp_path: Path) -> None:
    named = [Multiaddr.parse("/dns4/localhost/tcp/0")]
    assert await ports_of_a_life(tmp_path, named) == await ports_of_a_life(tmp_path, named)


async def test_a_port_that_another_has_is_replaced(tmp_path: Path) -> None:
    [port] = await ports_of_a_life(tmp_path, [ANY])
    taken = await trio.open_tcp_listeners(port, host="127.0.0.1")
    [other] = await ports_of_a_life(tmp_path, [ANY], port)
    await taken[0].aclose()
    assert other != port
    assert await ports_of_a_life(tmp_path, [ANY]) == [other]


async def test_a_port_that_was_asked_for_is_had_or_refused(tmp_path: Path) -> None:
    await ports_of_a_life(tmp_path, [ANY])
    taken = await trio.open_tcp_listeners(0, host="127.0.0.1")
    asked = Multiaddr.tcp("127.0.0.1", taken[0].socket.getsockname()[1])
    with pytest.raises(ConfigError, match="cannot listen"):
        await ports_of_a_life(tmp_path, [asked])
    await taken[0].aclose()
    assert await ports_of_a_life(tmp_path, [asked]) == [asked.host_port[1]]


@pytest.mark.parametrize("damaged", [b"", b"-1", b"70000", b"4001 x", b"\xff" * 300, b"9" * 9])
async def test_a_damaged_file_costs_the_port(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "ports").write_bytes(damaged)
    [port] = await ports_of_a_life(tmp_path, [ANY])
    assert (tmp_path / "ports").read_bytes() == str(port).encode()
