"""Names, keys and signatures."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.identity import (
    FOREIGN,
    KeyPair,
    PeerId,
    base58_decode,
    base58_encode,
    decode_peer_id_untrusted,
    signed_bytes,
    verify,
)


@given(st.binary(max_size=60))
def test_base58_goes_both_ways(data: bytes) -> None:
    assert base58_decode(base58_encode(data)) == data


def test_base58_vectors() -> None:
    assert base58_encode(b"Hello World!") == "2NEpo7TZRRrLZSi2U"
    assert base58_encode(bytes.fromhex("0000287fb4cd")) == "11233QC4"


@pytest.mark.parametrize("text", ["0", "O", "I", "l", "é", "1" * 129])
def test_what_is_no_base58_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="base58"):
        base58_decode(text)


def test_a_peer_id_is_libp2ps() -> None:
    # RFC 8032, test 1.
    key = KeyPair(
        bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    )
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.peer_id.public_key.hex() == public
    assert str(key.peer_id).startswith("12D3Koo")
    assert PeerId.from_base58(str(key.peer_id)) == key.peer_id
    assert len(key.peer_id.digest) == 38


def test_peer_ids_sort_hash_and_show() -> None:
    one, other = (KeyPair(bytes([seed]) * 32).peer_id for seed in (1, 2))
    assert {one: 1}[PeerId(one.digest)] == 1
    assert sorted([one, other]) == sorted([other, one])
    assert repr(one) == f"PeerId({str(one)[:4]}…{str(one)[-4:]})"
    assert str(one).endswith(one.short)


@pytest.mark.parametrize("data", [b"", bytes(38), b"\x12\x20" + bytes(32), "text", None, 7])
def test_what_is_no_peer_id_is_a_bad_message(data: object) -> None:
    with pytest.raises(BadMessage):
        decode_peer_id_untrusted(data)


def test_a_signature_holds_for_its_domain_only() -> None:
    key = KeyPair(b"\x07" * 32)
    signature = key.sign("/shoal/a/1.0.0", b"payload")
    assert verify(key.peer_id, "/shoal/a/1.0.0", b"payload", signature)
    assert not verify(key.peer_id, "/shoal/b/1.0.0", b"payload", signature)
    assert not verify(key.peer_id, "/shoal/a/1.0.0", b"payloaf", signature)
    assert not verify(KeyPair(b"\x08" * 32).peer_id, "/shoal/a/1.0.0", b"payload", signature)
    assert not verify(key.peer_id, FOREIGN, b"payload", signature)
    assert not verify(key.peer_id, "/shoal/a/1.0.0", b"payload", b"short")


@given(
    st.text(max_size=20), st.binary(max_size=20), st.text(max_size=20), st.binary(max_size=20)
)
def test_no_two_domains_and_payloads_sign_the_same_bytes(
    a: str, x: bytes, b: str, y: bytes
) -> None:
    assert (signed_bytes(a, x) == signed_bytes(b, y)) == ((a, x) == (b, y))


def test_a_key_shows_no_secret() -> None:
    key = KeyPair(b"\x07" * 32)
    assert key.seed.hex() not in repr(key)
    assert repr(key) == f"KeyPair({key.peer_id!r})"
    with pytest.raises(ValueError, match="32 bytes"):
        KeyPair(b"short")
