"""What goes wrong on a peer's behalf costs that peer, never the node."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import trio
import trio.testing

from p2p.errors import LocalProtocolError
from p2p.host import MAX_OUTBOX, PeerEvent, request, serve_requests
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.swarm import identify, outbox as outbox_module
from p2p.swarm.swarm import open_host
from p2p.transport.connection import Connection
from p2p.transport.memory import MemoryNetwork
from p2p.wire import MIB
from tests.support.hosts import QUIET, hosts

ECHO = ProtocolId("/test/echo")
NEWS = ProtocolId("/test/news")


async def echo(peer: PeerId, data: bytes) -> bytes:
    return data


@pytest.mark.parametrize("where", ["identify", "reader", "lane", "listener"])
async def test_a_bug_that_a_peer_can_trigger_costs_that_peer_only(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of these were seen: before, each of them ended the node."""
    network = MemoryNetwork()
    evil = KeyPair(b"\x66" * 32)

    def crash(*_: object, **__: object) -> None:
        raise ValueError("our bug")

    async with (
        hosts(2, network=network, is_strict=False) as (victim, honest),
        open_host(network=network, listen=("/memory/0",), config=QUIET, key=evil) as attacker,
    ):
        victim.set_handler(ECHO, serve_requests(echo))
        await honest.connect_addr(victim.addrs[0])
        await trio.testing.wait_all_tasks_blocked()
        with monkeypatch.context() as patch, ExitStack() as blocks:
            if where == "identify":
                patch.setattr(identify, "decode_info_untrusted", crash)
            elif where == "reader":
                patch.setattr(Connection, "_receive", crash)
            elif where == "lane":
                patch.setattr(outbox_module.Lane, "run", crash)
            else:
                blocks.enter_context(
                    victim.watching(
                        lambda event: crash() if event.peer == evil.peer_id else None
                    )
                )
            await attacker.connect_addr(victim.addrs[0])
            victim.send(evil.peer_id, NEWS, b"x")
            await trio.testing.wait_all_tasks_blocked()
        assert await request(honest, victim.peer_id, ECHO, b"still here") == b"still here"


async def test_peers_that_do_not_read_hold_a_share_of_what_may_wait() -> None:
    """Beyond the list: before, each of 1,024 peers could leave 4 MiB of messages unread."""
    box = outbox_module.Outbox(lambda lane: None)
    peers = [KeyPair(bytes([number]) * 32).peer_id for number in range(40)]
    message = bytes(MAX_OUTBOX // 8)
    for peer in peers:
        while box.put(peer, NEWS, message):
            pass
    assert sum(box._bytes.values()) == box._total <= 24 * MIB
    reader = KeyPair(b"\x77" * 32).peer_id
    assert box.put(reader, NEWS, bytes(1000))  # a peer that reads is not held up by those


async def test_a_lane_that_a_peer_does_not_read_is_given_up(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Beyond the list: before, what waited for a peer that never read waited for ever."""
    async with hosts(2) as (host, sleeper):

        async def never_read(_: object) -> None:
            await trio.sleep_forever()

        sleeper.set_handler(NEWS, never_read)
        await host.connect_addr(sleeper.addrs[0])
        for _ in range(5):  # the peer's window takes the first 4 MiB
            while host.send(sleeper.peer_id, NEWS, bytes(500_000)):
                pass
            await trio.testing.wait_all_tasks_blocked()
        assert host._outbox._total > 1_000_000
        await host.world.sleep(120)
        assert host._outbox._total == 0


async def test_sending_never_raises_for_what_a_peer_did() -> None:
    """Timers send; what a peer did must not come out of `Host.send`."""
    events: list[PeerEvent] = []
    async with hosts(2) as (host, other):
        with host.watching(events.append), other.receiving(NEWS, lambda _, message: None):
            await host.connect_addr(other.addrs[0])
            for _ in range(3):
                assert host.send(other.peer_id, NEWS, b"x")
                await trio.testing.wait_all_tasks_blocked()
                for connection in host._connector._connections.get(other.peer_id, []):
                    connection.close()
                host.send(other.peer_id, NEWS, b"while it closes")
                await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(LocalProtocolError):
                host.send(other.peer_id, NEWS, bytes(2_000_000))
