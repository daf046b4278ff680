"""``shoal push`` and ``pull`` at two homes behind real routers, and one open node."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.cast_process import Cast, cast, contents, folder_at

PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
TABLE = """
table ip nat {{
  chain pre {{ type nat hook prerouting priority -100;
    {inbound}
  }}
  chain post {{ type nat hook postrouting priority 100;
    oifname "wan" masquerade {mapping}
  }}
  chain forward {{ type filter hook forward priority 0; policy accept;
    ct state established,related accept
    iifname "wan" ct status dnat accept
    iifname "wan" drop
  }}
  chain input {{ type filter hook input priority 0; policy accept;
    iifname "wan" ct state established,related accept
    iifname "wan" drop
  }}
}}
"""
ROUTERS = {
    # keeps the port, and lets in only what answers
    "port": TABLE.format(inbound="", mapping=""),
    # another port for each connection: nobody can be told where to dial
    "symmetric": TABLE.format(inbound="", mapping="fully-random"),
    # forwards everything
    "cone": TABLE.format(
        inbound='iifname "wan" tcp dport 1024-65535 dnat to 10.77.0.2', mapping=""
    ),
}


def reason_to_skip() -> str | None:
    """Why there can be no homes on this machine; None if there can."""
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool, path=PATH) is None]
    if missing:
        return f"needs {', '.join(missing)} (packages iproute2 and nftables)"
    try:
        with Town() as town:
            town.home("probe", 2, "port")
    except subprocess.CalledProcessError as error:
        return f"no namespaces with routers here: {error.stderr.strip()}"
    return None


def run(*words: object, given: str = "") -> str:
    done = subprocess.run(
        list(map(str, words)), check=True, capture_output=True, text=True, input=given,
        env={**os.environ, "PATH": PATH},
    )  # fmt: skip
    return done.stdout


class Town:
    """Machines on one internet, 11.77.0.0/24, which leads nowhere else. A block."""

    def __init__(self) -> None:
        self._prefix = f"shoal{os.getpid()}"
        self._spaces: list[str] = []

    def __enter__(self) -> Town:
        self._net = self._space("net")
        run("ip", "-n", self._net, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self._net, "link", "set", "bridge", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._spaces:
            subprocess.run(
                ["ip", "netns", "del", name], check=False, capture_output=True,
                env={**os.environ, "PATH": PATH},
            )  # fmt: skip

    def _space(self, name: str) -> str:
        name = f"{self._prefix}-{name}"
        run("ip", "netns", "add", name)
        self._spaces.append(name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        return name

    def _link(self, inner: str, device: str, outer: str, end: str) -> None:
        peer = ("type", "veth", "peer", "name", end, "netns", outer)
        run("ip", "link", "add", device, "netns", inner, *peer)
        run("ip", "-n", inner, "link", "set", device, "up")
        run("ip", "-n", outer, "link", "set", end, "up")

    def public(self, name: str, number: int) -> list[str]:
        """Add a machine at 11.77.0.``number``. Returns what to write before its commands."""
        space = self._space(name)
        self._join(space, number)
        return ["ip", "netns", "exec", space]

    def _join(self, space: str, number: int) -> None:
        port = f"port{number}"
        self._link(space, "wan", self._net, port)
        run("ip", "-n", self._net, "link", "set", port, "master", "bridge")
        run("ip", "-n", space, "addr", "add", f"11.77.0.{number}/24", "dev", "wan")

    def home(self, name: str, number: int, kind: str, mbit: float = 0.0) -> list[str]:
        """Add a machine behind a router of `ROUTERS` at 11.77.0.``number``."""
        router, inside = self._space(f"{name}-r"), self._space(name)
        self._join(router, number)
        self._link(inside, "eth0", router, "lan")
        run("ip", "-n", router, "addr", "add", "10.77.0.1/24", "dev", "lan")
        run("ip", "-n", inside, "addr", "add", "10.77.0.2/24", "dev", "eth0")
        run("ip", "-n", inside, "route", "add", "default", "via", "10.77.0.1")
        run("ip", "netns", "exec", router, "nft", "-f", "-", given=ROUTERS[kind])
        if mbit:
            line = ("tbf", "rate", f"{mbit}mbit", "burst", "32kb", "latency", "100ms")
            for device in ("wan", "lan"):
                run("tc", "-n", router, "qdisc", "add", "dev", device, "root", *line)
        return ["ip", "netns", "exec", inside]

    def carried(self, number: int) -> int:
        """Bytes that the machine at 11.77.0.``number`` has sent and received."""
        folder = f"/sys/class/net/port{number}/statistics"
        return sum(
            int(run("ip", "netns", "exec", self._net, "cat", f"{folder}/{way}_bytes"))
            for way in ("rx", "tx")
        )


@contextmanager
def town_of(
    kinds: tuple[str, str], mbit: float = 0.0
) -> Iterator[tuple[Town, list[list[str]]]]:
    """A public machine at 11.77.0.9, and two homes."""
    with Town() as town:
        machines = [town.public("open", 9)]
        for name, number, kind in (("a", 11, kinds[0]), ("b", 12, kinds[1])):
            machines.append(town.home(name, number, kind, mbit))
        yield town, machines


def write_relay(folder: Path, number: int = 9) -> list[str]:
    """Arguments of a node at 11.77.0.``number`` that relays for strangers."""
    config = folder / f"relay{number}.toml"
    config.write_text(
        f'listen = ["/ip4/11.77.0.{number}/tcp/4001"]\n[relay]\nstrangers = true\n',
        encoding="ascii",
    )
    return ["--config", str(config), "--data", str(folder / f"relay{number}"), "--json"]


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
