"""Whatever bytes come, parsers of groups, log-probs and kept places raise `BadMessage` only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.identity import verify
from p2p.wire import pack
from roles.engines.base import Completion, Group
from roles.protocol.core.account import decode_account_untrusted
from roles.protocol.core.groups import (
    decode_groups_untrusted,
    decode_logprobs_untrusted,
    encode_groups,
)
from roles.protocol.core.statements import decode_accusation_untrusted
from roles.trainer.taken import decode_taken_untrusted
from tests.support.foreign import foreign

GROUP = Group(0, (Completion((1, 2, 70_000), proof=b"p"), Completion((3,))))
arrays = st.binary(max_size=24)
shaped = st.lists(
    st.tuples(st.integers(-1, 2**33), arrays, arrays, arrays, arrays).map(list), max_size=3
).map(pack)


@given(data=shaped)
def test_groups_in_form_are_groups_or_bad_messages(data: bytes) -> None:
    """Lengths, tokens, sizes and proofs of any bytes: what is read is written the same."""
    with contextlib.suppress(BadMessage):
        assert encode_groups(decode_groups_untrusted(data)) == data


@given(data=st.binary(min_size=8, max_size=8) | st.binary(max_size=20))
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
        decode_groups_untrusted,
        decode_accusation_untrusted,
        lambda data: decode_taken_untrusted(data, verify),
    ],
)
@given(data=foreign)
def test_only_bad_message(parse: Callable[[bytes], object], data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        parse(data)
