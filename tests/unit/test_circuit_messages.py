"""Messages of circuits, hole punching and AutoNAT, byte by byte as libp2p has them."""

from __future__ import annotations

import pytest

from p2p.circuit.messages import (
    HolePunch,
    HopMessage,
    HopStatus,
    HopType,
    PunchType,
    StopMessage,
    StopType,
    check_voucher_untrusted,
    sign_voucher,
)
from p2p.errors import BadMessage
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr, decode_multiaddr_untrusted
from p2p.swarm.core.limits import group_of
from p2p.wire import frame

RELAY, PEER, OTHER = (KeyPair(bytes([number]) * 32) for number in (1, 2, 3))
PLACE = Multiaddr.tcp("203.0.113.7", 4001)
CIRCUIT = PLACE.with_peer(RELAY.peer_id).through


def test_circuits_are_addresses() -> None:
    assert str(CIRCUIT) == f"/ip4/203.0.113.7/tcp/4001/p2p/{RELAY.peer_id}/p2p-circuit"
    assert CIRCUIT.to_bytes().hex() == f"04cb007107060fa1a50326{RELAY.peer_id.hex()}a202"
    for addr in (CIRCUIT, CIRCUIT.with_peer(PEER.peer_id)):
        assert Multiaddr.parse(str(addr)) == addr == decode_multiaddr_untrusted(addr.to_bytes())
        assert addr.relay == PLACE.with_peer(RELAY.peer_id)
        assert addr.transport == CIRCUIT
    assert (CIRCUIT.peer_id, PLACE.relay) == (None, None)
    assert CIRCUIT.with_peer(PEER.peer_id).peer_id == PEER.peer_id


@pytest.mark.parametrize(
    "text",
    [
        "/p2p-circuit",
        f"{PLACE}/p2p-circuit",
        f"/p2p/{RELAY.peer_id}/p2p-circuit",
        f"{CIRCUIT}/p2p-circuit",
        f"{CIRCUIT}/p2p/{PEER.peer_id}/p2p-circuit",
        f"{CIRCUIT}/tcp/1",
    ],
)
def test_circuits_over_circuits_are_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no place to dial|must come last|is no address"):
        Multiaddr.parse(text)


def test_peers_behind_a_relay_do_not_count_as_the_relays_host() -> None:
    one, other = (group_of(CIRCUIT.with_peer(key.peer_id)) for key in (PEER, OTHER))
    assert one.network == other.network != group_of(PLACE).network
    assert one.host != other.host


def test_messages_are_those_of_libp2p() -> None:
    """Bytes that relays of go-libp2p, js-libp2p and py-libp2p took."""
    peer = PEER.peer_id
    assert frame(HopMessage(kind=HopType.RESERVE).encode()).hex() == "020800"
    connect = HopMessage(kind=HopType.CONNECT, peer=peer).encode()
    assert frame(connect).hex() == "2c080112280a26" + peer.hex()
    accept = StopMessage(kind=StopType.STATUS, status=HopStatus.OK).encode()
    assert frame(accept).hex() == "0408012064"
    assert frame(HolePunch(PunchType.SYNC).encode()).hex() == "0308ac02"


def test_a_voucher_is_believed_only_from_its_relay_about_its_peer() -> None:
    voucher = sign_voucher(RELAY, PEER.peer_id, 1_800_000_000)
    check_voucher_untrusted(voucher, RELAY.peer_id, PEER.peer_id)
    for relay, peer in ((OTHER, PEER), (RELAY, OTHER)):
        with pytest.raises(BadMessage):
            check_voucher_untrusted(voucher, relay.peer_id, peer.peer_id)
    with pytest.raises(BadMessage, match="signature"):
        check_voucher_untrusted(
            voucher[:-1] + bytes([voucher[-1] ^ 1]), RELAY.peer_id, PEER.peer_id
        )
