"""go-libp2p on the other side of the wire: the daemon p2pd, which the PyPI wheel hivemind has
in it. ``make interop`` takes it out; without it these tests skip.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import p2p
from p2p.protobuf import as_bytes_untrusted, field, fields_untrusted
from p2p.wire import FrameReader, frame
from tests.support.foreign_nodes import (
    LITTLE,
    circuit_of,
    open_home,
    open_relay,
    talking,
    try_circuit,
    try_echo,
    until,
)

P2PD = Path(os.environ.get("GO_P2PD") or Path(__file__).parents[2] / "build" / "p2pd")
PATIENCE = 60
OK, CONNECT, LIST_PEERS = 0, 1, 5

pytestmark = [
    pytest.mark.interop,
    pytest.mark.deep,
    pytest.mark.skipif(sys.platform != "linux", reason="the wheel's p2pd is Linux's"),
    pytest.mark.skipif(
        not P2PD.is_file(), reason="go's p2pd is not there: run make interop, or set GO_P2PD"
    ),
]

Ask = Callable[[bytes], Awaitable[dict[int, list[bytes | int]]]]


@asynccontextmanager
async def go_node(folder: Path, *options: str) -> AsyncIterator[tuple[p2p.Multiaddr, Ask]]:
    """A go-libp2p node, where it can be dialled, and what sends a request to its owner's
    socket."""
    socket = folder / "control"
    command = [str(P2PD), "-listen", f"/unix{socket}", "-hostAddrs", "/ip4/127.0.0.1/tcp/0"]

    async def ask(request: bytes) -> dict[int, list[bytes | int]]:
        async with await trio.open_unix_socket(str(socket)) as stream:
            await stream.send_all(frame(request))
            answer = await FrameReader(stream, 2**16).receive()
        assert answer is not None
        found: dict[int, list[bytes | int]] = {}
        for number, value in fields_untrusted(answer):
            found.setdefault(number, []).append(value)
        return found

    async with talking([*command, *options], cwd=folder) as next_line:
        assert (await next_line()).startswith("Control socket")
        peer = p2p.PeerId.from_base58((await next_line()).split()[-1])
        assert await next_line() == "Peer Addrs:"
        yield p2p.Multiaddr.parse(await next_line()).with_peer(peer), ask


def is_relayed(ask_answer: dict[int, list[bytes | int]], peer: p2p.PeerId) -> bool:
    """Return True if a list of peers has ``peer`` with an address of a circuit."""
    for info in ask_answer.get(6, []):
        fields = list(fields_untrusted(as_bytes_untrusted(info, "a peer")))
        if (1, peer) in fields:
            addrs = [
                as_bytes_untrusted(value, "an address") for key, value in fields if key == 2
            ]
            return any(b"\xa2\x02" in addr for addr in addrs)
    return False


async def test_we_meet_through_a_relay_of_go(tmp_path: Path) -> None:
    """The limits are go's own: 2 minutes and 128 KiB."""
    limits = ("-relayTimeLimit", "2m", "-relayDataLimit", "131072")
    with trio.fail_after(PATIENCE):
        async with (
            go_node(tmp_path, "-forceReachabilityPublic", *limits) as (relay, _),
            open_home(relay) as home,
            p2p.open_host(strict=True) as guest,
        ):
            peer = await try_circuit(guest, circuit_of(home))
            with pytest.RaisesGroup(trio.BrokenResourceError, trio.BrokenResourceError):
                await try_echo(guest, peer, 2**18)
            # the next stream gets a circuit of its own
            await try_echo(guest, peer, LITTLE)


async def test_go_reserves_at_our_relay_and_we_dial_it(tmp_path: Path) -> None:
    with trio.fail_after(PATIENCE):
        async with open_relay() as relay, p2p.open_host(strict=True) as guest:
            options = ("-autoRelay", "-dhtClient", "-b", "-forceReachabilityPrivate",
                       "-relayDiscovery=0")  # fmt: skip
            named = ("-bootstrapPeers", str(relay), "-trustedRelays", str(relay))
            async with go_node(tmp_path, *options, *named) as (go, _):
                assert go.peer_id is not None
                while True:  # until it has reserved
                    try:
                        peer = await guest.connect_addr(relay.through.with_peer(go.peer_id))
                        break
                    except p2p.PeerUnreachable:
                        await guest.world.sleep(0.2)
                assert await p2p.ping(guest, peer) < PATIENCE
                await until(guest, lambda: guest.info(peer) is not None)
                assert not guest.is_direct(peer)


@pytest.mark.parametrize("whose", ["go", "ours"])
async def test_go_dials_us_through_a_relay(whose: str, tmp_path: Path) -> None:
    with trio.fail_after(PATIENCE):
        for folder in ("relay", "guest"):
            (tmp_path / folder).mkdir()
        async with (
            go_node(tmp_path / "relay", "-forceReachabilityPublic") as (gos, _),
            open_relay() as ours,
            go_node(tmp_path / "guest") as (_, ask),
            open_home(gos if whose == "go" else ours) as home,
        ):
            place = field(2, circuit_of(home).transport.to_bytes())
            request = field(1, CONNECT) + field(2, field(1, home.peer_id) + place)
            answer = await ask(request)
            assert answer[1] == [OK], answer
            assert is_relayed(await ask(field(1, LIST_PEERS)), home.peer_id)
