"""Whatever bytes come, parsers of `roles.protocol.core.messages` raise `BadMessage` only."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings, strategies as st
from roles.protocol.core.lies import decode_lie_untrusted
from roles.protocol.core.messages import (
    decode_commitment_untrusted,
    decode_delivery_untrusted,
    decode_groups_untrusted,
    decode_head_untrusted,
    decode_logprobs_untrusted,
    decode_receipt_untrusted,
    decode_reply_untrusted,
    decode_submission_untrusted,
    decode_verdict_untrusted,
    encode_groups,
)

from p2p.errors import BadMessage
from p2p.identity import verify
from p2p.wire import frame, pack
from roles.engines.base import Completion, Group
from roles.protocol.core.account import decode_account_untrusted
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


GROUP = Group(0, (Completion((1, 2, 70_000), proof=b"p"), Completion((3,))))
arrays = st.binary(max_size=24)
shaped = st.lists(
    st.tuples(st.integers(-1, 2**33), arrays, arrays, arrays, arrays).map(list), max_size=3
).map(pack)


@given(data=shaped)
@settings(max_examples=300)
def test_groups_in_form_are_groups_or_bad_messages(data: bytes) -> None:
    """Lengths, tokens, sizes and proofs of any bytes: what is read is written the same."""
    with contextlib.suppress(BadMessage):
        assert encode_groups(decode_groups_untrusted(data)) == data


@given(data=st.binary(min_size=8, max_size=8) | st.binary(max_size=20))
@settings(max_examples=300)
def test_log_probs_are_numbers_not_above_0_or_bad_messages(data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        (group,) = decode_logprobs_untrusted(data, (GROUP,))
        values = [value for one in group.completions for value in one.logprobs]
        assert len(values) == 4
        assert all(-65504 <= value <= 0 for value in values)


@pytest.mark.parametrize(
    "parse",
    [
        decode_account_untrusted,
        decode_commitment_untrusted,
        decode_groups_untrusted,
        decode_receipt_untrusted,
        decode_head_untrusted,
        lambda data: decode_head_untrusted(frame(data)),
        lambda data: decode_submission_untrusted(data, verify),
        lambda data: decode_verdict_untrusted(data, verify),
        lambda data: decode_reply_untrusted(data, verify),
        lambda data: decode_delivery_untrusted(data, verify),
        lambda data: decode_lie_untrusted(data, verify),
    ],
)
@given(data=foreign)
@settings(max_examples=100)
def test_only_bad_message(parse, data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        parse(data)
