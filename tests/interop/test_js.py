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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio

import p2p
from p2p.reach.autonat import open_autonat
from p2p.reach.lan import open_lan
from p2p.wire import MIB
from tests.support.foreign_nodes import (
    ECHO,
    LITTLE,
    circuit_of,
    echo,
    open_home,
    open_relay,
    other_machine,
    talking,
    try_circuit,
    try_echo,
    until,
)

JS = Path(__file__).parent / "js"
PATIENCE = 90
"""Seconds; node takes 5 to start on a loaded machine."""

pytestmark = [
    pytest.mark.interop,
    pytest.mark.deep,
    pytest.mark.skipif(
        shutil.which("node") is None or not (JS / "node_modules").is_dir(),
        reason="js-libp2p not installed: run make interop",
    ),
]


def command(*args: object, listen: str = "") -> list[str]:
    env = ["env", f"LISTEN={listen}"] if listen else []
    return [*env, "node", "--import", "./poly.mjs", "node.mjs", *map(str, args)]


@asynccontextmanager
async def js_node(*args: object, listen: str = "") -> AsyncIterator[p2p.Multiaddr]:
    """A js-libp2p node that echoes, and where it can be dialled."""
    async with talking(command(*args or ("listen",), listen=listen), cwd=JS) as next_line:
        yield p2p.Multiaddr.parse(json.loads(await next_line())["addr"])


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
                await try_echo(host, peer, 16 * MIB)
            info = host.info(peer)
            assert info is not None
            assert info.agent.startswith("js-libp2p/")
            assert info.observed_addr is not None
            with pytest.raises(p2p.ProtocolNotSupported):
                await host.open_stream(peer, p2p.ProtocolId("/shoal/nobody/1.0.0"))


async def test_we_meet_through_a_relay_of_js() -> None:
    with trio.fail_after(PATIENCE):
        async with (
            js_node("relay") as relay,
            open_home(relay) as home,
            p2p.open_host(strict=True) as guest,
        ):
            await try_circuit(guest, circuit_of(home))


async def test_we_dial_js_behind_our_relay() -> None:
    with trio.fail_after(PATIENCE):
        async with (
            open_relay() as relay,
            js_node("reserve", relay) as addr,
            p2p.open_host(strict=True) as guest,
        ):
            await try_circuit(guest, addr)


@pytest.mark.parametrize("whose", ["js", "ours"])
async def test_js_dials_us_through_a_relay(whose: str) -> None:
    with trio.fail_after(PATIENCE):
        async with (
            open_relay() as ours,
            js_node("relay") as theirs,
            open_home(ours if whose == "ours" else theirs) as home,
            talking(command("circuit", circuit_of(home)), cwd=JS) as next_line,
        ):
            assert json.loads(await next_line()) == {"echo": True, "limited": True}


PUBLIC = "8.8.4.4", "9.9.9.9", "1.1.1.1", "5.5.5.5", "23.23.23.23"


@pytest.fixture
def internet() -> Iterator[None]:
    """A machine of its own with public addresses: js dials no others for AutoNAT and DCUtR."""
    with other_machine(*PUBLIC):
        yield


async def test_js_dials_our_addresses_for_dial_data(internet: None) -> None:
    """AutoNAT v2 with js as server. Loopback's connections come from the address that they
    lead to, so ours is another one, for which js wants data first."""
    mine, theirs = (f"/ip4/{host}/tcp/4001" for host in PUBLIC[:2])
    with trio.fail_after(PATIENCE):
        async with (
            p2p.open_host(strict=True, listen=[mine]) as host,
            open_autonat(host) as autonat,
            js_node("listen", listen=theirs) as addr,
        ):
            peer = await host.connect_addr(addr)
            await until(host, lambda: host.info(peer) is not None)
            open_one, closed = (p2p.Multiaddr.tcp(PUBLIC[0], port) for port in (4001, 4002))
            answers = await autonat.survey([open_one, closed], [peer])
            assert answers == {open_one: [True], closed: [False]}


async def test_we_dial_an_address_of_js(internet: None) -> None:
    """AutoNAT v2 with js as client, which believes four servers in different networks."""
    mine = f"/ip4/{PUBLIC[0]}/tcp/4001"
    with trio.fail_after(PATIENCE):
        async with AsyncExitStack() as stack:
            servers = []
            for place in PUBLIC[1:]:
                host = await stack.enter_async_context(
                    p2p.open_host(strict=True, listen=[f"/ip4/{place}/tcp/4001"])
                )
                await stack.enter_async_context(open_autonat(host))
                servers.append(host.addrs[0])
            command_line = command("asks", *servers, listen=mine)
            async with talking(command_line, cwd=JS) as next_line:
                assert json.loads(await next_line()) == {"before": False}
                assert json.loads(await next_line()) == {"confirmed": True}


@asynccontextmanager
async def public_relay() -> AsyncIterator[p2p.Multiaddr]:
    async with open_relay(f"/ip4/{PUBLIC[1]}/tcp/4001") as relay:
        yield relay


async def test_js_that_accepted_our_circuit_begins_a_punch(internet: None) -> None:
    """DCUtR with js as B, which knows no port of ours before we tell it."""
    config = p2p.SwarmConfig(punch=True)
    with trio.fail_after(PATIENCE):
        async with (
            public_relay() as relay,
            js_node("reserve", relay, listen=f"/ip4/{PUBLIC[0]}/tcp/4001") as addr,
            p2p.open_host(strict=True, config=config, listen=["/ip4/0.0.0.0/tcp/0"]) as guest,
        ):
            peer = await guest.connect_addr(addr)
            await try_echo(guest, peer, LITTLE)
            await until(guest, lambda: guest.is_direct(peer))
            await try_echo(guest, peer)


async def test_we_begin_a_punch_with_js_that_dialled_our_circuit(internet: None) -> None:
    """DCUtR with js as A. It takes the third try, in which parts change: js dials from another
    port, so that our packet comes to its listener, a server like us."""
    with trio.fail_after(PATIENCE):
        async with (
            public_relay() as relay,
            open_home(relay, punch=True) as home,
            talking(
                command("circuit", circuit_of(home), listen=f"/ip4/{PUBLIC[0]}/tcp/4001"),
                cwd=JS,
            ) as next_line,
        ):
            assert json.loads(await next_line()) == {"echo": True, "limited": True}
            assert json.loads(await next_line()) == {"direct": True}


async def test_js_and_we_find_each_other_by_mdns() -> None:
    with trio.fail_after(PATIENCE), other_machine():
        async with (
            p2p.open_host(strict=True) as host,
            open_lan(host) as lan,
            talking(command("lan"), cwd=JS) as next_line,
        ):
            addr = p2p.Multiaddr.parse(json.loads(await next_line())["addr"])
            place = str(host.addrs[0].transport)
            said = json.loads(await next_line())
            assert said == {"found": str(host.peer_id), "at": [place]}
            while addr not in lan.found:
                await lan.news.wait()


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
