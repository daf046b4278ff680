"""Parsers of the work protocol raise `BadMessage` only, and read what was written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.identity import verify
from p2p.wire import pack
from proofs.checks import Verdict
from roles.protocol.core.answer import (
    MAX_ANSWER,
    MAX_REPLY,
    MAX_REQUEST,
    ContentRequest,
    ContestRequest,
    Refused,
    VerdictRequest,
    WindowRequest,
    Word,
    decode_answer_untrusted,
    decode_reply_untrusted,
    decode_request_untrusted,
    encode_reply,
    encode_request,
)
from roles.protocol.core.conviction import open_conviction_untrusted
from roles.protocol.core.verdict import decode_verdict_untrusted
from roles.protocol.core.window import (
    decode_commitment_untrusted,
    decode_submission_untrusted,
    decode_window_untrusted,
)
from tests.support.foreign import foreign
from tests.unit import work_messages as made

WORKER, VALIDATOR, TRAINER = made.key(0), made.key(0, "validator"), made.key(0, "trainer")
SIGNED = made.window(WORKER, version=3)
SUBMISSION = made.submission_of(SIGNED.window.commitment(5))
REJECTION = made.verdict(VALIDATOR, SUBMISSION.commitment, Verdict.REJECTED)
ANSWER = made.answer(TRAINER, SIGNED, tuple(range(16)))
CONVICTION = pack([REJECTION.to_bytes(), SUBMISSION.to_bytes(), None])
REQUESTS = (
    WindowRequest(SIGNED, b"stamp"),
    ContentRequest(SIGNED, ANSWER, 5, 1000),
    VerdictRequest(REJECTION),
    ContestRequest(REJECTION, SIGNED),
)
REPLIES = (ANSWER, REJECTION, Refused("the first place is 7", retry=False, next=7), *Word)

Parse = Callable[[bytes], object]
PARSERS: dict[str, tuple[Parse, bytes]] = {
    "commitment": (decode_commitment_untrusted, SUBMISSION.commitment.to_bytes()),
    "window": (lambda data: decode_window_untrusted(data, verify), SIGNED.to_bytes()),
    "submission": (
        lambda data: decode_submission_untrusted(data, verify),
        SUBMISSION.to_bytes(),
    ),
    "verdict": (lambda data: decode_verdict_untrusted(data, verify), REJECTION.to_bytes()),
    "answer": (lambda data: decode_answer_untrusted(data, verify), ANSWER.to_bytes()),
    "conviction": (
        lambda data: open_conviction_untrusted(data, {made.TERMS}, verify),
        CONVICTION,
    ),
    **{
        f"request {request.KIND}": (decode_request_untrusted, encode_request(request))
        for request in REQUESTS
    },
    **{
        f"reply {number}": (
            lambda data: decode_reply_untrusted(data, verify),
            encode_reply(one),
        )
        for number, one in enumerate(REPLIES)
    },
}


@pytest.mark.parametrize("name", PARSERS)
@given(data=foreign)
def test_whatever_the_bytes_only_bad_message_is_raised(name: str, data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        PARSERS[name][0](data)


@pytest.mark.parametrize("name", PARSERS)
@given(at=st.integers(0, 2**16), byte=st.integers(0, 255), cut=st.booleans())
def test_altered_messages_are_refused_or_read(name: str, at: int, byte: int, cut: bool) -> None:
    parse, good = PARSERS[name]
    at %= len(good)
    data = good[:at] if cut else good[:at] + bytes([byte]) + good[at + 1 :]
    with contextlib.suppress(BadMessage):
        parse(data)


@given(kind=st.sampled_from([one.KIND for one in REQUESTS]), body=foreign)
def test_bodies_of_each_kind_of_request_raise_bad_message_only(kind: str, body: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode_request_untrusted(pack([kind, body]))


def test_what_is_written_is_read() -> None:
    for request in REQUESTS:
        data = encode_request(request)
        assert decode_request_untrusted(data) == request
        assert len(data) <= MAX_REQUEST
    for reply in REPLIES:
        data = encode_reply(reply)
        assert decode_reply_untrusted(data, verify) == reply
        assert len(data) <= MAX_REPLY
    assert len(ANSWER.to_bytes()) <= MAX_ANSWER


def test_a_changed_field_breaks_each_signature() -> None:
    for data in (
        replace(ANSWER, owed=0).to_bytes(),
        replace(REJECTION, verdict=Verdict.ACCEPTED).to_bytes(),
        replace(SIGNED, window=replace(SIGNED.window, first=1)).to_bytes(),
    ):
        for parse, _ in PARSERS.values():
            with pytest.raises(BadMessage):
                parse(data)


@pytest.mark.parametrize(
    "request_",
    [
        ContentRequest(made.window(WORKER, version=4), ANSWER, 5, 1000),
        ContentRequest(SIGNED, replace(ANSWER, wanted=(1, 2)), 5, 1000),
        ContentRequest(SIGNED, replace(ANSWER, wanted=(5, 5)), 5, 1000),
        ContentRequest(SIGNED, ANSWER, 5, 1 << 40),
        ContestRequest(REJECTION, made.window(WORKER, version=4)),
        ContestRequest(REJECTION, made.window(WORKER, version=3, kind="other")),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(request_: ContentRequest) -> None:
    with pytest.raises(BadMessage):
        decode_request_untrusted(encode_request(request_))
