"""Relays that lie, clients that take all, and peers that say where we are not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
import trio

from p2p import open_host
from p2p.circuit.core.book import RelayConfig
from p2p.circuit.messages import HOP_ID, HopMessage, HopStatus, HopType, Reservation
from p2p.circuit.relay import receive_message, relaying
from p2p.errors import PeerUnreachable
from p2p.host import Stream, request, send_frame, serve_requests
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from p2p.reach.autonat import AutonatConfig, open_autonat
from p2p.swarm import identify
from p2p.wire import FrameReader
from tests.unit.test_circuit import ECHO, KEYS, OPEN, echo, until


async def test_a_relay_that_grants_and_does_not_serve_is_got_around_by_the_second() -> None:
    async with (
        open_host(key=KEYS[0]) as liar,
        open_host(key=KEYS[1], strict=True) as relay,
        open_host(key=KEYS[2], listen=[], strict=True) as home,
        open_host(key=KEYS[3], strict=True) as guest,
    ):
        asked = 0

        async def grant(stream: Stream) -> None:
            nonlocal asked
            await receive_message(stream)
            if stream.peer == guest.peer_id:
                asked += 1
                await trio.sleep_forever()
            until_when = Reservation(int(liar.world.wall()) + 3600)
            granted = HopMessage(
                kind=HopType.STATUS, status=HopStatus.OK, reservation=until_when
            )
            await send_frame(stream, granted.encode())

        with (
            liar.serving(HOP_ID, grant),
            relaying(relay.world, relay, KEYS[1], OPEN),
            home.serving(ECHO, serve_requests(echo)),
        ):
            for other in (liar, relay):
                await home.listen(other.addrs[0].through)
            guest.add_addrs(home.peer_id, home.addrs)
            assert await request(guest, home.peer_id, ECHO, b"hello") == b"hello"
            assert asked == 1


async def test_a_circuit_outlives_its_reservation_and_a_new_one_does_not_begin() -> None:
    brief = RelayConfig(strangers=True, lifetime=1.0)
    async with (
        open_host(key=KEYS[0], strict=True) as relay,
        open_host(key=KEYS[1], listen=[], strict=True) as home,
        open_host(key=KEYS[2], strict=True) as guest,
        open_host(key=KEYS[3], strict=True) as late,
    ):
        with (
            relaying(relay.world, relay, KEYS[0], brief),
            home.serving(ECHO, serve_requests(echo)),
        ):
            await home.listen(relay.addrs[0].through)
            [place] = home.addrs
            await guest.connect_addr(place)
            async with await guest.open_stream(home.peer_id, ECHO) as stream:
                await relay.world.sleep(1.5)  # the reservation ends in mid-transfer
                with pytest.raises(PeerUnreachable, match="NO_RESERVATION"):
                    await late.connect_addr(place)
                await send_frame(stream, b"still")
                assert await FrameReader(stream, 1024).receive() == b"still"


async def test_an_address_that_observers_invent_is_not_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All peers say that they see us at a victim, where nobody knows the dial-back's number."""
    victim = Multiaddr.parse("/ip4/127.0.0.2/tcp/4001")
    encode = identify.encode_info

    def lie(
        peer: PeerId,
        protocols: Sequence[ProtocolId],
        addrs: Sequence[Multiaddr],
        _: Multiaddr | None,
    ) -> bytes:
        return encode(peer, protocols, addrs, victim)

    monkeypatch.setattr(identify, "encode_info", lie)

    local = AutonatConfig(private=True, pause=0.05, delay=0.0)
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(open_host(strict=True))
        for _ in range(3):
            liar = await stack.enter_async_context(open_host(strict=True))
            await stack.enter_async_context(open_autonat(liar, local))
            await host.connect_addr(liar.addrs[0])
        await until(host, lambda: bool(host.observed))
        autonat = await stack.enter_async_context(open_autonat(host, local))
        while not autonat.standing:
            await autonat.news.wait()
        host.set_standing(autonat.standing)
        [invented] = host.observed
        assert invented.parts[0] == victim.parts[0]
        assert autonat.standing[invented] is False
        assert [addr.parts[0] for addr in host.addrs] == [("ip4", "127.0.0.1")]
