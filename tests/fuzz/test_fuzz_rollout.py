"""Whatever bytes come, parsers of `roles.protocol.core.messages` raise `BadMessage` only."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings, strategies as st

from p2p.errors import BadMessage
from p2p.identity import verify
from p2p.wire import frame, pack
from roles.protocol.core.messages import (
    decode_commitment_untrusted,
    decode_delivery_untrusted,
    decode_groups_untrusted,
    decode_head_untrusted,
    decode_receipt_untrusted,
    decode_reply_untrusted,
    decode_submission_untrusted,
    decode_verdict_untrusted,
)
from tests.attacks.test_content_bombs import BOMBS

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary()
    | st.text(),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=12,
)
bombs = st.builds(
    lambda bomb, cut: bomb[:cut], st.sampled_from(list(BOMBS.values())), st.integers(0, 5000)
)
packed = values.map(pack) | bombs
foreign = st.binary(max_size=200) | packed | st.lists(packed, max_size=8).map(pack)


@pytest.mark.parametrize(
    "parse",
    [
        decode_commitment_untrusted,
        decode_groups_untrusted,
        decode_receipt_untrusted,
        decode_head_untrusted,
        lambda data: decode_head_untrusted(frame(data)),
        lambda data: decode_submission_untrusted(data, verify),
        lambda data: decode_verdict_untrusted(data, verify),
        lambda data: decode_reply_untrusted(data, verify),
        lambda data: decode_delivery_untrusted(data, verify),
    ],
)
@given(data=foreign)
@settings(max_examples=100)
def test_only_bad_message(parse, data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        parse(data)
