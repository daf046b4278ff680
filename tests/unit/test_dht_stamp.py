from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from p2p.dht.stamp import check_stamp, make_stamp, stamp_work
from p2p.identity import PeerId

PEER = PeerId.from_public_key(bytes(range(32)))


@given(st.binary(min_size=32, max_size=32), st.integers(0, 10))
def test_a_made_stamp_is_worth_its_difficulty(key: bytes, difficulty: int) -> None:
    peer = PeerId.from_public_key(key)
    nonce = make_stamp(peer, difficulty)
    assert check_stamp(peer, nonce, difficulty)
    assert stamp_work(peer, nonce) >= difficulty
    assert make_stamp(peer, difficulty) == nonce


def test_a_stamp_is_bound_to_its_peer() -> None:
    nonce = make_stamp(PEER, 14)
    other = PeerId.from_public_key(bytes(32))
    assert not check_stamp(other, nonce, 14)


@pytest.mark.parametrize("nonce", [b"", b"1234567", b"123456789"])
def test_a_nonce_of_the_wrong_length_is_worth_nothing(nonce: bytes) -> None:
    assert not check_stamp(PEER, nonce, 0)
