"""``shoal push`` and ``pull`` at two homes behind real routers, and one open node."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.cast_process import Cast, cast, contents, folder_at
from tests.support.homes import Town, reason_to_skip, town_of, write_relay

WHY_NOT = reason_to_skip()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
LISTEN = ("--listen", "/ip4/0.0.0.0/tcp/0", "--json")


@contextmanager
def relay_at(machine: list[str], folder: Path, number: int = 9) -> Iterator[str]:
    """A node that relays for strangers; gives its address."""
    words = [*machine, sys.executable, "-m", "p2p.node", *write_relay(folder, number)]
    node = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert node.stdout is not None
        yield json.loads(node.stdout.readline())["addrs"][0]
    finally:
        node.terminate()
        node.wait(30)
        node.stdout.close()


@contextmanager
def pulling(
    kinds: tuple[str, str], folder: Path, what: Path, mbit: float = 0.0
) -> Iterator[tuple[Town, Cast]]:
    with (
        town_of(kinds, mbit) as (town, [open_node, home, other]),
        relay_at(open_node, folder) as relay,
        cast(
            "push", what, "--data", folder / "state", "--relay", relay, *LISTEN, inside=home
        ) as pusher,
    ):
        ticket = pusher.said("ticket")["ticket"]
        with cast("pull", ticket, "--out", folder / "out", *LISTEN, inside=other) as puller:
            yield town, puller


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kinds", "is_direct"),
    [
        (("port", "port"), True),
        (("cone", "symmetric"), True),
        (("symmetric", "cone"), True),
        (("port", "symmetric"), False),
    ],
)
def test_two_homes_share_a_folder(
    tmp_path: Path, kinds: tuple[str, str], is_direct: bool
) -> None:
    """Where one router is symmetric and the other filters by port, the relay carries it."""
    what = folder_at(tmp_path / "what") if is_direct else tmp_path / "what"
    if not is_direct:
        what.mkdir()
        (what / "small").write_bytes(bytes(range(256)) * 1024)
    with pulling(kinds, tmp_path, what) as (_, puller):
        puller.said("path", that=lambda event: event["path"] == "relay")
        if is_direct:
            puller.said("path", that=lambda event: event["path"] == "direct")
        puller.said("whole")
        assert puller.end() == 0
        assert contents(tmp_path / "out") == contents(what)
        assert len(puller.all_said("path")) == 1 + is_direct


LOOK = """
import sys, trio
from p2p import open_host
from p2p.identity import KeyPair
from p2p.reach.nat import open_nat

async def main():
    key = KeyPair(bytes(32))
    async with open_host(key=key, listen=["/ip4/0.0.0.0/tcp/0"]) as host:
        places = [await host.connect_addr(addr) and addr for addr in sys.argv[1:]]
        async with open_nat(host, key) as nat:
            with trio.fail_after(60):
                while len(host._seen) < 2:
                    await host.news.wait()
            print(nat.needs_open_peers)

trio.run(main)
"""


@pytest.mark.deep
def test_a_host_knows_a_router_that_gives_each_connection_another_port(tmp_path: Path) -> None:
    with town_of(("port", "symmetric")) as (town, [open_node, *homes]):
        other = town.public("other", 10)
        with relay_at(open_node, tmp_path) as one, relay_at(other, tmp_path, 10) as two:
            said = [
                subprocess.run(
                    [*home, sys.executable, "-c", LOOK, one, two],
                    check=True, capture_output=True, text=True,
                ).stdout.strip()
                for home in homes
            ]  # fmt: skip
    assert said == ["False", "True"]


@pytest.mark.deep
def test_the_relay_carries_little_of_a_large_folder(tmp_path: Path) -> None:
    what = tmp_path / "what"
    what.mkdir()
    size = 100_000_000
    (what / "large").write_bytes(random.Random(7).randbytes(size))
    with pulling(("port", "port"), tmp_path, what, mbit=40.0) as (town, puller):
        puller.said("whole", timeout=300)
        assert puller.end() == 0
        assert town.carried(9) < 0.05 * size
