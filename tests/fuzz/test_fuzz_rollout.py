"""Whatever bytes come, parsers of `roles.protocol.core.groups` raise `BadMessage` only."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings, strategies as st

from p2p.errors import BadMessage
from p2p.identity import PeerId, verify
from p2p.wire import frame, pack
from roles.engines.base import Completion, Group
from roles.protocol.core.account import decode_account_untrusted
from roles.protocol.core.away import decode_away_untrusted
from roles.protocol.core.beacon import decode_pledge_untrusted, decode_reveal_untrusted
from roles.protocol.core.findings import decode_acceptance_untrusted
from roles.protocol.core.lots import (
    MAX_WINDOW,
    decode_commit_untrusted,
    decode_note_untrusted,
    decode_signed_window_untrusted,
    decode_window_untrusted,
    decode_witness_reply_untrusted,
    decode_witnessed_untrusted,
)
from roles.protocol.core.groups import (
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
from roles.protocol.core.refusals import (
    decode_appeal_untrusted,
    decode_asked_untrusted,
    decode_complaint_untrusted,
    decode_refusal_untrusted,
    decode_ruling_untrusted,
)
from roles.protocol.core.settlement import (
    decode_settlement_reply_untrusted,
    decode_settlement_untrusted,
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


TRAINER = PeerId.from_public_key(bytes(32))
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


numbers = st.integers(0, 2**34)


@given(
    contents=st.integers(0, 16 * 33).map(bytes)
    | st.integers(1, 16).map(lambda n: bytes(32 * n)),
    numbers=st.tuples(*[numbers] * 6),
)
@settings(max_examples=200)
def test_windows_in_form_are_windows_or_bad_messages(
    contents: bytes, numbers: tuple[int, ...]
) -> None:
    """What is read is written the same, and within its bounds."""
    version, first, teaching, chain, link, due = numbers
    fields = [bytes(32), TRAINER, version, bytes(32), first, contents]
    data = pack([*fields, teaching, bytes(32), chain, link, due])
    with contextlib.suppress(BadMessage):
        window = decode_window_untrusted(data)
        assert window.to_bytes() == data
        assert 0 < len(window.places) <= MAX_WINDOW
        assert window.version < window.due


@pytest.mark.parametrize(
    "parse",
    [
        decode_account_untrusted,
        decode_away_untrusted,
        decode_complaint_untrusted,
        decode_ruling_untrusted,
        lambda data: decode_appeal_untrusted(data, verify),
        lambda data: decode_asked_untrusted(data, verify),
        lambda data: decode_acceptance_untrusted(data, verify),
        lambda data: decode_refusal_untrusted(data, verify),
        decode_commitment_untrusted,
        decode_groups_untrusted,
        decode_receipt_untrusted,
        decode_head_untrusted,
        lambda data: decode_head_untrusted(frame(data)),
        lambda data: decode_submission_untrusted(data, verify),
        lambda data: decode_verdict_untrusted(data, verify),
        lambda data: decode_reply_untrusted(data, verify),
        lambda data: decode_delivery_untrusted(data, verify),
        decode_window_untrusted,
        decode_settlement_reply_untrusted,
        lambda data: decode_reveal_untrusted(data, verify),
        lambda data: decode_pledge_untrusted(data, b"", verify),
        lambda data: decode_signed_window_untrusted(data, verify),
        lambda data: decode_witnessed_untrusted(data, verify),
        lambda data: decode_note_untrusted(data, TRAINER, verify),
        lambda data: decode_commit_untrusted(data, verify),
        lambda data: decode_witness_reply_untrusted(data, verify),
        lambda data: decode_settlement_untrusted(data, verify),
    ],
)
@given(data=foreign)
@settings(max_examples=100)
def test_only_bad_message(parse, data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        parse(data)
