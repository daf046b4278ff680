"""Addresses as text and as bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.identity import KeyPair
from p2p.multiaddr import MAX_MULTIADDR, Multiaddr, decode_multiaddr_untrusted

PEER = KeyPair(b"\x01" * 32).peer_id

hosts = st.one_of(
    st.ip_addresses(v=4).map(lambda ip: ("ip4", str(ip))),
    st.ip_addresses(v=6).map(lambda ip: ("ip6", str(ip))),
    st.from_regex(r"[a-z0-9-]{1,20}(\.[a-z]{2,5})?", fullmatch=True).map(
        lambda name: ("dns4", name)
    ),
)
addrs = st.one_of(
    st.tuples(hosts, st.integers(0, 65535)).map(
        lambda t: Multiaddr((t[0], ("tcp", str(t[1]))))
    ),
    st.integers(0, 2**63 - 1).map(lambda number: Multiaddr((("memory", str(number)),))),
)


@given(addrs, st.booleans())
def test_text_and_bytes_go_both_ways(addr: Multiaddr, named: bool) -> None:
    if named:
        addr = addr.with_peer(PEER)
    assert Multiaddr.parse(str(addr)) == addr
    assert decode_multiaddr_untrusted(addr.to_bytes()) == addr


def test_the_binary_form_is_multiformats() -> None:
    assert (
        Multiaddr.parse("/ip4/127.0.0.1/tcp/4001").to_bytes().hex() == "047f00000106" + "0fa1"
    )
    assert Multiaddr.parse("/dns4/a.io/tcp/80").to_bytes().hex() == "3604612e696f060050"


def test_parts_are_taken_apart() -> None:
    addr = Multiaddr.parse("/ip4/10.0.0.1/tcp/80").with_peer(PEER)
    assert addr.peer_id == PEER
    assert addr.transport == Multiaddr.tcp("10.0.0.1", 80)
    assert addr.host_port == ("10.0.0.1", 80)
    assert addr.transport.peer_id is None
    assert Multiaddr.tcp("::1", 80) == Multiaddr.parse("/ip6/::1/tcp/80")
    assert repr(addr) == f"Multiaddr(/ip4/10.0.0.1/tcp/80/p2p/{PEER})"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "ip4/1.2.3.4/tcp/1",
        "/ip4/1.2.3.4/tcp",
        "/ip4/1.2.3/tcp/1",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/1.2.3.4/tcp/-1",
        "/ip4/1.2.3.4/tcp/٣",
        "/quic/1",
        "/dns4/a b/tcp/1",
        f"/p2p/{PEER}/tcp/1",
        "/p2p/12D3KooWbad",
        "/memory/x",
        "/dns4/" + "a" * MAX_MULTIADDR + "/tcp/1",
        f"/p2p/{PEER}",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/p2p/{PEER}",
        f"/p2p/{PEER}/p2p/{PEER}",
        "/tcp/1",
        "/ip4/1.2.3.4",
        f"/ip4/1.2.3.4/p2p/{PEER}",
        "/ip4/1.2.3.4/tcp/1/tcp/2",
        "/ip4/1.2.3.4/ip4/1.2.3.4/tcp/1",
        "/memory/1/tcp/2",
        "/tcp/2/ip4/1.2.3.4",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Multiaddr.parse(text)


def test_only_tcp_addresses_have_a_host_and_port() -> None:
    with pytest.raises(ValueError, match="not a TCP address"):
        _ = Multiaddr.parse("/memory/1").host_port


@pytest.mark.parametrize(
    "data", [b"", b"\x04\x7f", b"\xff" * 20, b"\x06\x00", bytes(600), "text", None, b"\x36\xff"]
)
def test_what_is_no_binary_address_is_a_bad_message(data: object) -> None:
    with pytest.raises(BadMessage):
        decode_multiaddr_untrusted(data)
