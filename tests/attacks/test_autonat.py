"""Peers say which of our addresses can be dialled; some lie, and some aim our dials."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import trio

from p2p import SwarmHost, open_host
from p2p.circuit.core.book import RelayConfig
from p2p.circuit.relay import relaying
from p2p.host import FrameReceiver, Stream, send_frame
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr
from p2p.reach import messages as msg
from p2p.reach.autonat import Autonat, AutonatConfig, open_autonat
from p2p.reach.core.verdict import judge
from p2p.swarm.swarm import SwarmConfig

LOCAL = AutonatConfig(private=True, pause=0.05, delay=0.0)
NONCE = 0x1122334455667788


async def until(autonat: Autonat, condition: Callable[[], object]) -> None:
    with trio.fail_after(30):
        while not condition():
            await autonat.news.wait()


@asynccontextmanager
async def open_server(config: AutonatConfig = LOCAL) -> AsyncIterator[SwarmHost]:
    async with open_host(strict=True) as host, open_autonat(host, config):
        yield host


@asynccontextmanager
async def open_servers(count: int) -> AsyncIterator[list[SwarmHost]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_server()) for _ in range(count)]


@asynccontextmanager
async def asking(
    servers: Sequence[SwarmHost], config: SwarmConfig | None = None
) -> AsyncIterator[tuple[SwarmHost, Autonat]]:
    async with (
        open_host(strict=True, config=config) as host,
        open_autonat(host, LOCAL) as autonat,
    ):
        for server in servers:
            await host.connect_addr(server.addrs[0])
        yield host, autonat


async def ask(
    host: SwarmHost, server: SwarmHost, addrs: Sequence[str | Multiaddr], *, pays: int = 0
) -> tuple[msg.Message, int]:
    """What the server says in the end, and the bytes of dial data that it was paid."""
    paid = 0
    places = tuple(Multiaddr.parse(str(addr)) for addr in addrs)
    async with await host.open_stream(server.peer_id, msg.DIAL_REQUEST_ID) as stream:
        receiver = FrameReceiver(stream, msg.MAX_MESSAGE)
        await send_frame(stream, msg.DialRequest(places, NONCE).encode())
        answer = msg.decode_untrusted(await receiver.receive() or b"")
        if isinstance(answer, msg.DialDataRequest) and pays:
            assert msg.DIAL_DATA <= answer.size <= msg.MAX_DIAL_DATA
            while paid < min(pays, answer.size):
                data = bytes(min(4000, answer.size - paid))
                await send_frame(stream, msg.DialDataResponse(data).encode())
                paid += len(data)
            if pays >= answer.size:
                answer = msg.decode_untrusted(await receiver.receive() or b"")
    return answer, paid


class Victim:
    """Counts who comes, and the bytes that he brings."""

    def __init__(self) -> None:
        self.connections = 0
        self.bytes = 0

    async def take(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        with suppress(trio.BrokenResourceError), trio.move_on_after(0.5):
            async for data in stream:
                self.bytes += len(data)


@asynccontextmanager
async def open_victim() -> AsyncIterator[tuple[Victim, str]]:
    victim = Victim()
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.2")
    port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, victim.take, [listener])
        yield victim, f"/ip4/127.0.0.2/tcp/{port}"
        nursery.cancel_scope.cancel()


async def test_a_node_knows_which_of_its_addresses_can_be_dialled() -> None:
    closed = Multiaddr.tcp("127.0.0.1", 1)
    async with (
        open_servers(3) as servers,
        asking(servers, SwarmConfig(announce=(closed,))) as (host, autonat),
    ):
        await until(autonat, lambda: None not in (autonat.standing or {closed: None}).values())
        (real,) = host.observed
        assert autonat.standing == {closed: False, real: True}
        assert autonat.reachable == (real,)


async def test_it_asks_again_when_an_address_comes() -> None:
    async with open_servers(3) as servers, asking(servers) as (host, autonat):
        await until(autonat, lambda: autonat.reachable == (host.addrs[0].transport,))
        await host.listen(Multiaddr.tcp("127.0.0.1", 0))
        await until(autonat, lambda: len(autonat.reachable) == 2)


def test_answers_count_when_two_agree() -> None:
    assert judge([True, True, False]) is True
    assert judge([False, None, False]) is False
    for unsure in ([True], [True, False], [True, None, None], [True, True, False, False], []):
        assert judge(unsure) is None


@pytest.mark.parametrize("says", [msg.DialStatus.OK, msg.DialStatus.DIAL_ERROR])
async def test_one_liar_of_three_decides_nothing(says: msg.DialStatus) -> None:
    async def lie(stream: Stream) -> None:
        await FrameReceiver(stream, msg.MAX_MESSAGE).receive()
        await send_frame(stream, msg.DialResponse(msg.ResponseStatus.OK, 0, says).encode())

    async with open_servers(2) as servers, open_host(strict=True) as liar:
        liar.set_handler(msg.DIAL_REQUEST_ID, lie)
        async with open_host(strict=True) as host:
            autonat = Autonat(host, LOCAL, None)
            host.set_handler(msg.DIAL_BACK_ID, autonat.serve_dial_back)
            for peer in (*servers, liar):
                await host.connect_addr(peer.addrs[0])
            real, closed = host.addrs[0].transport, Multiaddr.tcp("127.0.0.1", 1)
            await autonat.ask([real, closed], host.connected)
            assert autonat.standing == {real: True, closed: False}


async def test_a_yes_without_the_right_number_is_none() -> None:
    async def lie(stream: Stream) -> None:
        await FrameReceiver(stream, msg.MAX_MESSAGE).receive()
        async with open_host(listen=(), strict=True) as dialler:
            await dialler.connect_addr(clients[0].addrs[0])
            back = await dialler.open_stream(clients[0].peer_id, msg.DIAL_BACK_ID)
            await send_frame(back, msg.encode_dial_back(NONCE))
            with pytest.raises(trio.BrokenResourceError):
                await FrameReceiver(back, msg.MAX_MESSAGE).receive()
        wrong.append(True)
        answer = msg.DialResponse(msg.ResponseStatus.OK, 0, msg.DialStatus.OK)
        await send_frame(stream, answer.encode())

    clients: list[SwarmHost] = []
    wrong: list[bool] = []

    async with open_host(strict=True) as one, open_host(strict=True) as two:
        one.set_handler(msg.DIAL_REQUEST_ID, lie)
        two.set_handler(msg.DIAL_REQUEST_ID, lie)
        async with open_host(strict=True) as host:
            clients.append(host)
            for server in (one, two):
                await host.connect_addr(server.addrs[0])
            async with open_autonat(host, LOCAL) as autonat:
                addr = host.addrs[0].transport
                await autonat.ask([addr], [one.peer_id, two.peer_id])
                assert len(wrong) >= 2
                assert autonat.standing == {addr: None}


async def test_a_victim_gets_nothing_that_the_attacker_has_not_paid_for() -> None:
    async with open_server() as server, open_victim() as (victim, place):
        for pays in (0, 16_000, msg.MAX_DIAL_DATA):
            async with open_host(strict=True) as attacker:
                await attacker.connect_addr(server.addrs[0])
                answer, paid = await ask(attacker, server, [place], pays=pays)
            assert victim.connections == (pays == msg.MAX_DIAL_DATA)
            assert isinstance(answer, msg.DialResponse) is (pays == msg.MAX_DIAL_DATA)
        assert answer == msg.DialResponse(msg.ResponseStatus.OK, 0, msg.DialStatus.DIAL_ERROR)
        assert 0 < victim.bytes < paid / 10


@pytest.mark.parametrize(
    "addr",
    [
        "/ip4/127.0.0.1/tcp/4001", "/ip4/192.168.1.1/tcp/80", "/ip4/100.64.3.2/tcp/80",
        "/ip4/0.0.0.0/tcp/80", "/ip4/224.0.0.1/tcp/80", "/ip6/::1/tcp/80",
        "/ip6/fd00::1/tcp/80", "/ip6/::ffff:10.0.0.1/tcp/80", "/ip6/64:ff9b::a00:1/tcp/80",
        "/ip6/2002:a00:1::1/tcp/80", "/dns/localhost/tcp/80",
        f"/ip4/8.8.8.8/tcp/80/p2p/{KeyPair(bytes(32)).peer_id}/p2p-circuit",
    ],
)  # fmt: skip
async def test_what_is_not_public_is_not_dialled(addr: str) -> None:
    async with open_server(AutonatConfig()) as server, open_host(strict=True) as host:
        await host.connect_addr(server.addrs[0])
        assert await ask(host, server, [addr]) == (
            msg.DialResponse(msg.ResponseStatus.DIAL_REFUSED),
            0,
        )


async def test_a_peer_behind_a_relay_is_not_dialled() -> None:
    async with open_host(strict=True) as relay, open_host(strict=True) as host:
        with relaying(relay.world, relay, relay.world.signer, RelayConfig(strangers=True)):
            place = relay.addrs[0].through
            async with (
                open_host(strict=True, listen=[place]) as server,
                open_autonat(server, LOCAL),
            ):
                await host.connect_addr(server.addrs[0])
                answer, _ = await ask(host, server, host.addrs)
                assert answer == msg.DialResponse(msg.ResponseStatus.REQUEST_REJECTED)


async def test_a_flood_is_refused_and_others_are_served() -> None:
    async with open_server() as server, open_host(strict=True) as host:
        await host.connect_addr(server.addrs[0])
        closed = [Multiaddr.tcp("127.0.0.1", 1)]
        answers = [(await ask(host, server, closed))[0] for _ in range(40)]
        served = [one for one in answers if one.status == msg.ResponseStatus.OK]
        assert 12 <= len(served) < 20
        async with open_host(strict=True) as other:
            await other.connect_addr(server.addrs[0])
            answer, _ = await ask(other, server, closed)
            assert answer == msg.DialResponse(
                msg.ResponseStatus.OK, 0, msg.DialStatus.DIAL_ERROR
            )


async def test_a_crowd_shares_one_budget() -> None:
    tight = AutonatConfig(private=True, rate=0.05)
    async with open_server(tight) as server:
        answers = []
        for _ in range(5):
            async with open_host(strict=True) as host:
                await host.connect_addr(server.addrs[0])
                answers.append((await ask(host, server, ["/ip4/127.0.0.1/tcp/1"]))[0])
        statuses = [one.status for one in answers if isinstance(one, msg.DialResponse)]
        assert (
            statuses == [msg.ResponseStatus.OK] * 3 + [msg.ResponseStatus.REQUEST_REJECTED] * 2
        )
