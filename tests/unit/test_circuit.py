"""Two hosts talk through a third that cannot read what they say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from p2p import SwarmHost, open_host
from p2p.circuit.core.book import RelayBook, RelayConfig
from p2p.circuit.messages import (
    HOP_ID,
    STOP_ID,
    HopMessage,
    HopStatus,
    HopType,
    Reservation,
    StopMessage,
    StopType,
    decode_hop_untrusted,
    decode_stop_untrusted,
)  # fmt: skip
from p2p.circuit.relay import receive_message, relaying
from p2p.errors import ConfigError, PeerUnreachable, WrongPeer
from p2p.host import Stream, request, send_frame, serve_requests
from p2p.identity import KeyPair, PeerId
from p2p.transport.connection import secure
from p2p.transport.core.noise import StaticKey

OPEN = RelayConfig(strangers=True)
ECHO = "/test/echo/1.0.0"
KEYS = [KeyPair(bytes([number]) * 32) for number in range(1, 9)]


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        with trio.fail_after(30):
            await main()

    trio.run(limited)


async def until(host: SwarmHost, condition: Callable[[], bool]) -> None:
    with trio.fail_after(30):
        while not condition():
            await host.news.wait()


async def echo(_: PeerId, data: bytes) -> bytes:
    return data


@asynccontextmanager
async def open_relay(config: RelayConfig = OPEN) -> AsyncIterator[SwarmHost]:
    async with open_host(key=KEYS[0], strict=True) as relay:
        with relaying(relay.world, relay, KEYS[0], config):
            yield relay


@asynccontextmanager
async def open_home(relay: SwarmHost, key: KeyPair) -> AsyncIterator[SwarmHost]:
    """A host that nobody can dial but through the relay."""
    place = relay.addrs[0].through
    async with open_host(key=key, listen=[place], strict=True) as home:
        with home.serving(ECHO, serve_requests(echo)):
            yield home


async def test_two_hosts_talk_through_a_third() -> None:
    async with (
        open_relay() as relay,
        open_home(relay, KEYS[1]) as home,
        open_host(key=KEYS[2], strict=True) as guest,
    ):
        assert home.addrs == (relay.addrs[0].through.with_peer(home.peer_id),)
        await guest.connect_addr(home.addrs[0])
        data = bytes(range(256)) * 512
        assert await request(guest, home.peer_id, ECHO, data) == data
        with guest.serving(ECHO, serve_requests(echo)):
            assert await request(home, guest.peer_id, ECHO, data) == data
        for host, other in ((guest, home), (home, guest)):
            assert not host.is_direct(other.peer_id)
            assert host.is_direct(relay.peer_id)
        assert guest.network_of(home.peer_id) == f"circuit/{relay.peer_id}"


async def test_a_circuit_ends_at_its_limit_of_bytes() -> None:
    limit = RelayConfig(strangers=True, bytes=64 * 1024)
    async with (
        open_relay(limit) as relay,
        open_home(relay, KEYS[1]) as home,
        open_host(key=KEYS[2], strict=True) as guest,
    ):
        await guest.connect_addr(home.addrs[0])
        assert await request(guest, home.peer_id, ECHO, bytes(1024)) == bytes(1024)
        with pytest.raises((trio.BrokenResourceError, PeerUnreachable)):
            await request(guest, home.peer_id, ECHO, bytes(256 * 1024))
        # the next request gets a circuit of its own
        assert await request(guest, home.peer_id, ECHO, bytes(1024)) == bytes(1024)


async def test_strangers_get_no_reservation_unless_the_relay_says_so() -> None:
    async with open_relay(RelayConfig()) as relay:
        with pytest.raises(ConfigError, match="PERMISSION_DENIED"):
            async with open_home(relay, KEYS[1]):
                pass


async def test_without_a_reservation_there_is_no_circuit() -> None:
    async with (
        open_relay() as relay,
        open_host(key=KEYS[1], strict=True) as home,
        open_host(key=KEYS[2], strict=True) as guest,
    ):
        await home.connect_addr(relay.addrs[0])
        with pytest.raises(PeerUnreachable, match="NO_RESERVATION"):
            await guest.connect_addr(relay.addrs[0].through.with_peer(home.peer_id))


async def test_a_relay_that_does_not_relay_is_named() -> None:
    async with open_host(key=KEYS[0]) as plain:
        with pytest.raises(ConfigError, match=f"the relay {plain.peer_id} is of no use"):
            async with open_home(plain, KEYS[1]):
                pass


async def test_circuits_do_not_run_over_circuits() -> None:
    """A relay that is reached through a relay refuses, so that no loop can carry anything."""
    async with (
        open_relay() as relay,
        open_home(relay, KEYS[1]) as home,
        open_host(key=KEYS[2], strict=True) as guest,
    ):
        with relaying(home.world, home, KEYS[1], OPEN):
            await guest.connect_addr(home.addrs[0])
            for kind, peer in ((HopType.RESERVE, None), (HopType.CONNECT, relay.peer_id)):
                assert await ask(guest, home.peer_id, HopMessage(kind=kind, peer=peer)) == (
                    HopStatus.PERMISSION_DENIED
                )


async def ask(host: SwarmHost, relay: PeerId, question: HopMessage) -> int:
    async with await host.open_stream(relay, HOP_ID) as stream:
        await send_frame(stream, question.encode())
        return decode_hop_untrusted(await receive_message(stream)).status


class Hostile:
    """A relay that grants everything, and hands on what ``change`` makes of it."""

    def __init__(self, host: SwarmHost, change: Callable[[bytes], bytes]) -> None:
        self.seen = bytearray()
        self.circuits = 0
        self._host = host
        self._change = change

    async def serve(self, stream: Stream) -> None:
        question = decode_hop_untrusted(await receive_message(stream))
        granted = HopMessage(
            kind=HopType.STATUS,
            status=HopStatus.OK,
            reservation=Reservation(int(self._host.world.wall()) + 3600),
        )
        if question.kind is HopType.RESERVE:
            await send_frame(stream, granted.encode())
            return
        assert question.peer is not None
        self.circuits += 1
        async with await self._host.open_stream(question.peer, STOP_ID) as stop:
            await send_frame(
                stop, StopMessage(kind=StopType.CONNECT, peer=stream.peer).encode()
            )
            await receive_message(stop)
            await send_frame(stream, granted.encode())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._copy, stream, stop)
                nursery.start_soon(self._copy, stop, stream)

    async def _copy(self, source: Stream, sink: Stream) -> None:
        while data := bytes(await source.receive_some()):
            self.seen += data
            await sink.send_all(self._change(data))
        await sink.send_eof()


@asynccontextmanager
async def open_hostile(
    change: Callable[[bytes], bytes],
) -> AsyncIterator[tuple[Hostile, SwarmHost, SwarmHost]]:
    async with open_host(key=KEYS[0]) as relay:
        hostile = Hostile(relay, change)
        with relay.serving(HOP_ID, hostile.serve):
            async with (
                open_home(relay, KEYS[1]) as home,
                open_host(key=KEYS[2], strict=True) as guest,
            ):
                guest.add_addrs(home.peer_id, home.addrs)
                yield hostile, home, guest


async def test_a_relay_sees_ciphertext() -> None:
    secret = b"what only two may read " * 100
    async with open_hostile(bytes) as (relay, home, guest):
        assert await request(guest, home.peer_id, ECHO, secret) == secret
        assert len(relay.seen) > 2 * len(secret)
        assert b"only two may read" not in relay.seen
        assert ECHO.encode() not in relay.seen


async def test_a_relay_that_injects_ends_the_circuit_and_nothing_else() -> None:
    """What arrives is what was sent, or nothing."""
    injects = False

    def change(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if injects else data

    async with open_hostile(change) as (_, home, guest):
        assert await request(guest, home.peer_id, ECHO, b"before") == b"before"
        injects = True
        with pytest.raises((trio.BrokenResourceError, PeerUnreachable)):
            await request(guest, home.peer_id, ECHO, b"during")
        injects = False
        for _ in range(3):  # nobody was taken for the culprit, and refused
            await until(guest, lambda: home.peer_id not in guest.connected)
            assert await request(guest, home.peer_id, ECHO, b"after") == b"after"
            await guest.disconnect(home.peer_id)


async def test_a_relay_cannot_put_itself_in_the_place_of_a_peer() -> None:
    """Noise proves who answers: a relay that ends the circuit itself is found out."""
    async with open_host(key=KEYS[0]) as relay, open_host(key=KEYS[2]) as guest:

        async def serve(stream: Stream) -> None:
            await receive_message(stream)
            granted = HopMessage(kind=HopType.STATUS, status=HopStatus.OK)
            await send_frame(stream, granted.encode())
            static = StaticKey.create(KEYS[0], bytes(32))
            await secure(stream, static, relay.world.entropy, dialer=False)

        victim = KEYS[1].peer_id
        with relay.serving(HOP_ID, serve), pytest.raises(WrongPeer):
            await guest.connect_addr(relay.addrs[0].through.with_peer(victim))


async def test_a_relay_that_grants_and_hands_over_strangers_serves_only_what_was_reserved() -> (
    None
):
    """A stop from a peer at which there is no reservation is refused."""
    async with (
        open_host(key=KEYS[0]) as relay,
        open_host(key=KEYS[1], strict=True) as home,
    ):
        await relay.connect_addr(home.addrs[0])
        async with await relay.open_stream(home.peer_id, STOP_ID) as stop:
            await send_frame(
                stop, StopMessage(kind=StopType.CONNECT, peer=KEYS[2].peer_id).encode()
            )
            answer = decode_stop_untrusted(await receive_message(stop))
        assert answer.status == HopStatus.PERMISSION_DENIED


async def test_a_reservation_ends_with_the_relay() -> None:
    async with open_host(key=KEYS[1], listen=[], strict=True) as home:
        async with open_relay() as relay:
            await home.listen(relay.addrs[0].through)
            assert home.addrs
        await until(home, lambda: not home.addrs)


async def test_a_hundred_greedy_clients_leave_a_place_for_a_member() -> None:
    book = RelayBook(RelayConfig(reservations=16, strangers=True))
    greedy = [KeyPair(number.to_bytes(32, "big")).peer_id for number in range(100, 200)]
    granted = 0
    for now in range(20):
        for peer in greedy:
            granted += book.reserve(peer, "net", float(now), is_member=False) == 100
    assert len(book.reserved) == 16
    member = KEYS[3].peer_id
    assert book.reserve(member, "other", 20.0, is_member=True) is HopStatus.OK
    assert member in book.reserved
    assert len(book.reserved) == 16


def book_of(members: int, **limits: int) -> tuple[RelayBook, list[PeerId]]:
    book = RelayBook(RelayConfig(**limits))
    peers = [KeyPair(number.to_bytes(32, "big")).peer_id for number in range(1, members + 1)]
    for number, peer in enumerate(peers):
        assert book.reserve(peer, f"net {number}", 0.0, is_member=True) is HopStatus.OK
    return book, peers


def test_the_largest_network_makes_room() -> None:
    book = RelayBook(RelayConfig(reservations=4))
    peers = [KeyPair(number.to_bytes(32, "big")).peer_id for number in range(1, 6)]
    for peer, network in zip(peers, ["a", "a", "a", "b", "c"], strict=True):
        assert book.reserve(peer, network, 0.0, is_member=True) is HopStatus.OK
    assert book.reserved == (peers[0], peers[1], peers[3], peers[4])


def stay() -> None:
    """Ends no circuit."""


def test_a_peer_has_no_more_circuits_than_its_share() -> None:
    book, (one, two, three) = book_of(3, per_peer=2)
    answers = [book.connect(one, two, 100.0, stay) for _ in range(3)]
    assert answers == [HopStatus.OK, HopStatus.OK, HopStatus.RESOURCE_LIMIT_EXCEEDED]
    assert book.connect(three, one, 100.0, stay) is HopStatus.RESOURCE_LIMIT_EXCEEDED
    book.end(one, two, stay)
    assert book.connect(three, one, 100.0, stay) is HopStatus.OK
    assert book.circuits == 2


def test_when_circuits_are_full_the_peer_with_the_most_makes_way() -> None:
    book, (one, two, three, four) = book_of(4, circuits=3)
    ended: list[int] = []
    for number in range(3):
        book.connect(one, two, 100.0, partial(ended.append, number))
    assert book.connect(three, two, 100.0, stay) is HopStatus.OK
    assert ended == [2]  # the newest of the greedy one
    book.end(one, two, partial(ended.append, 2))
    assert book.circuits == 3
    assert book.connect(four, two, 100.0, stay) is HopStatus.OK
    assert book.connect(one, two, 100.0, stay) is HopStatus.RESOURCE_LIMIT_EXCEEDED
    assert ended == [2, 1]


def test_one_peer_cannot_take_all_circuits_to_a_target() -> None:
    book, (one, two, three, four, five) = book_of(5, per_peer=3)
    ended: list[int] = []
    for number in range(3):
        book.connect(one, two, 100.0, partial(ended.append, number))
    for number in range(3, 6):
        book.connect(three, five, 100.0, partial(ended.append, number))
    assert book.connect(four, two, 100.0, stay) is HopStatus.OK
    assert ended == [2]  # and none of those that lead elsewhere
    assert book.connect(five, two, 100.0, stay) is HopStatus.RESOURCE_LIMIT_EXCEEDED


def test_an_aborted_circuit_may_end_after_all_others_of_its_peer() -> None:
    book, (one, two, three) = book_of(3, circuits=2)
    ended: list[int] = []
    aborts = [partial(ended.append, number) for number in range(2)]
    for abort in aborts:
        book.connect(one, two, 100.0, abort)
    assert book.connect(three, two, 100.0, stay) is HopStatus.OK
    assert ended == [1]
    for abort in aborts:
        book.end(one, two, abort)
    book.end(three, two, stay)
    assert book.circuits == 0


def test_who_asks_too_often_is_refused() -> None:
    book, (one, two) = book_of(2)
    answers = []
    for _ in range(20):
        answers.append(book.connect(one, two, 100.0, stay))
        if answers[-1] is HopStatus.OK:
            book.end(one, two, stay)
    assert answers.count(HopStatus.OK) == 8
    assert book.connect(one, two, 103.0, stay) is HopStatus.OK
