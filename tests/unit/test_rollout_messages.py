"""Submissions, verdicts and replies: what goes in comes out, and nothing else does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from p2p.errors import BadMessage
from p2p.identity import KeyPair, verify
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import frame, pack
from proofs.checks import Verdict
from roles.engines.base import Completion, Group
from roles.protocol.core.messages import (
    Commitment,
    Refusal,
    SignedVerdict,
    Submission,
    content_digest,
    decode_delivery_untrusted,
    decode_groups_untrusted,
    decode_head_untrusted,
    decode_reply_untrusted,
    decode_submission_untrusted,
    encode_delivery,
    encode_groups,
    encode_reply,
)

WORKER, VALIDATOR = KeyPair(b"w" * 32), KeyPair(b"v" * 32)

completions = st.tuples(
    st.lists(
        st.tuples(st.integers(0, 2**32 - 1), st.floats(-100, 0, width=32)),
        min_size=1,
        max_size=5,
    ),
    st.binary(max_size=40),
).map(
    lambda made: Completion(*(tuple(column) for column in zip(*made[0], strict=True)), made[1])
)
groups = st.builds(
    Group,
    st.integers(0, 2**32 - 1),
    st.lists(completions, min_size=1, max_size=4).map(tuple),
)


def submission(content: bytes = b"", **changed: object) -> Submission:
    fields = {
        "run": b"r" * 32,
        "node": WORKER.peer_id,
        "version": PolicyVersion(3),
        "policy": b"p" * 32,
        "index": 5,
        "content": content_digest(content),
        **changed,
    }
    return Submission.sign(Commitment(**fields), content, WORKER)  # type: ignore[arg-type]


def verdict_on(sent: Submission, verdict: Verdict = Verdict.ACCEPTED) -> SignedVerdict:
    unsigned = SignedVerdict(
        VALIDATOR.peer_id, sent.commitment, verdict, "within limits", 0.0, 1.0, (1.0, 0.0)
    )
    return unsigned.signed(VALIDATOR)


@given(st.lists(groups, min_size=1, max_size=4).map(tuple))
@settings(max_examples=50)
def test_groups_survive_the_wire(sent: tuple[Group, ...]) -> None:
    assert decode_groups_untrusted(encode_groups(sent)) == sent


def test_a_submission_survives_the_wire() -> None:
    sent = submission(b"content")
    assert decode_submission_untrusted(sent.to_bytes(), verify) == sent


@pytest.mark.parametrize("length", [0, 1, 200, 300, 70_000])
def test_a_head_says_all_that_the_whole_does_as_soon_as_it_is_there(length: int) -> None:
    """Issue 10.3: the seat comes after the head."""
    sent = submission(bytes(length))
    data = frame(sent.to_bytes())
    needed = len(data) - length
    assert all(decode_head_untrusted(data[:end]) is None for end in range(needed))
    for end in (needed, needed + length // 2, len(data)):
        head = decode_head_untrusted(data[:end])
        assert head is not None
        head.check_signature(verify)
        assert (head.content_bytes, head.begun) == (length, bytes(end - needed))
        assert head.with_content_untrusted(bytes(length)) == sent
    with pytest.raises(BadMessage, match="content"):
        head.with_content_untrusted(b"another")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (frame(pack([b"", b""])), "list of three"),
        (frame(pack(["text", b"", b""])), "are bytes"),
        (frame(pack([bytes(2000), b"", b""])), "longer than"),
        (frame(pack([b"", b"", b""]) + b"more"), "contradict"),
        (frame(submission(b"x").to_bytes()) + b"more", "follows"),
    ],
)
def test_what_is_no_head_is_refused(data: bytes, match: str) -> None:
    with pytest.raises(BadMessage, match=match):
        decode_head_untrusted(data)


def test_content_that_was_not_committed_to_is_refused() -> None:
    sent = submission(b"content")
    changed = Submission(sent.commitment, sent.signature, b"contenu")
    with pytest.raises(BadMessage, match="not what its commitment binds"):
        decode_submission_untrusted(changed.to_bytes(), verify)


@pytest.mark.parametrize("field", ["run", "version", "policy", "index"])
def test_a_commitment_cannot_be_altered(field: str) -> None:
    sent = submission(b"content")
    other = {"run": b"x" * 32, "version": PolicyVersion(4), "policy": b"x" * 32, "index": 6}[
        field
    ]
    forged = Submission(
        submission(b"content", **{field: other}).commitment, sent.signature, b"content"
    )
    with pytest.raises(BadMessage, match="signature is not its node's"):
        decode_submission_untrusted(forged.to_bytes(), verify)


def test_a_submission_signed_by_another_is_refused() -> None:
    sent = submission(b"content", node=VALIDATOR.peer_id)
    with pytest.raises(BadMessage, match="signature is not its node's"):
        decode_submission_untrusted(sent.to_bytes(), verify)


@pytest.mark.parametrize("verdict", list(Verdict))
def test_replies_survive_the_wire(verdict: Verdict) -> None:
    for reply in (
        verdict_on(submission(b"c"), verdict),
        Refusal("the queue is full", retry=True),
    ):
        assert decode_reply_untrusted(encode_reply(reply), verify) == reply


def test_a_verdict_signed_by_another_is_refused() -> None:
    honest = verdict_on(submission(b"c"))
    forged = SignedVerdict(
        WORKER.peer_id, honest.commitment, honest.verdict, honest.reason, 0.0, 1.0,
        honest.rewards, honest.signature,
    )  # fmt: skip
    with pytest.raises(BadMessage, match="signature is not its validator's"):
        decode_reply_untrusted(encode_reply(forged), verify)


def test_a_delivery_must_belong_together() -> None:
    first, second = submission(b"first"), submission(b"second")
    assert (
        decode_delivery_untrusted(encode_delivery(verdict_on(first), first), verify)[1] == first
    )
    with pytest.raises(BadMessage, match="about another submission"):
        decode_delivery_untrusted(encode_delivery(verdict_on(first), second), verify)


@pytest.mark.parametrize(
    ("length", "sizes", "proofs", "match"),
    [
        (b"\5\0\0\0", b"\0" * 4, b"", "lengths of a group do not fit"),
        (b"\4\0\0\0", b"", b"", "one proof for each completion"),
        (b"\4\0\0\0", b"\3\0\0\0", b"no", "sizes of a group's proofs do not fit"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    length: bytes, sizes: bytes, proofs: bytes, match: str
) -> None:
    raw = [0, length, b"\0" * 16, b"\0" * 16, sizes, proofs]
    with pytest.raises(BadMessage, match=match):
        decode_groups_untrusted(pack([raw]))
