"""Submissions, verdicts and replies: what goes in comes out, and nothing else does."""

from __future__ import annotations

import re
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from p2p.errors import BadMessage
from p2p.identity import KeyPair, verify
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import KI, frame, pack
from proofs.checks import Verdict
from proofs.toploc import proof_size
from roles.engines.base import Completion, Group
from roles.protocol.core.groups import (
    MAX_INDEX,
    AcceptedWork,
    Commitment,
    Refusal,
    SignedVerdict,
    Submission,
    content_digest,
    decode_delivery_untrusted,
    decode_groups_untrusted,
    decode_head_untrusted,
    decode_logprobs_untrusted,
    decode_reply_untrusted,
    decode_submission_untrusted,
    encode_groups,
    encode_reply,
)
from roles.shared.sizes import MAX_SUBMISSION, WorkSize

LOGPROBS = struct.pack("<2e", -0.5, -2.0)
WORKER, VALIDATOR = KeyPair(b"w" * 32), KeyPair(b"v" * 32)

tokens = st.lists(st.integers(0, 50_000), max_size=40) | st.lists(
    st.integers(0, 2**24 - 1), max_size=5
)
completions = st.builds(
    Completion, tokens=tokens.map(tuple), logprobs=st.just(()), proof=st.binary(max_size=40)
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
        VALIDATOR.peer_id, sent.commitment, verdict, "within limits", 0.0, 1.0, (1.0, 0.0),
        content_digest(LOGPROBS),
    )  # fmt: skip
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
    """The seat comes after the head."""
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
        honest.rewards, honest.logprobs, honest.signature,
    )  # fmt: skip
    with pytest.raises(BadMessage, match="signature is not its validator's"):
        decode_reply_untrusted(encode_reply(forged), verify)


def test_a_delivery_must_belong_together() -> None:
    first, second = submission(b"first"), submission(b"second")
    work = AcceptedWork(verdict_on(first), first, LOGPROBS)
    assert decode_delivery_untrusted(work.to_bytes(), verify) == work
    with pytest.raises(BadMessage, match="about another submission"):
        decode_delivery_untrusted(replace(work, submission=second).to_bytes(), verify)
    for other in (b"", LOGPROBS[:2], bytes(4)):
        with pytest.raises(BadMessage, match="log-probs are not those of its verdict"):
            decode_delivery_untrusted(replace(work, logprobs=other).to_bytes(), verify)


def test_log_probs_are_finite_none_is_above_0_and_each_token_has_one() -> None:
    group = Group(3, (Completion((1, 2)), Completion((4,), proof=b"proof")))
    packed = struct.pack("<3e", -0.5, 0.0, -65504.0)
    (held,) = decode_logprobs_untrusted(packed, (group,))
    assert [one.logprobs for one in held.completions] == [(-0.5, 0.0), (-65504.0,)]
    assert [one.tokens for one in held.completions] == [(1, 2), (4,)]
    assert held.completions[1].proof == b"proof"
    for wrong in (float("nan"), float("inf"), float("-inf"), 2**-24):
        with pytest.raises(BadMessage, match="not finite, or above 0"):
            decode_logprobs_untrusted(struct.pack("<3e", -0.5, wrong, -1.0), (group,))
    for data in (packed[:-1], packed[:-2], packed + packed, b""):
        with pytest.raises(BadMessage, match="bytes of log-probs for 3 tokens"):
            decode_logprobs_untrusted(data, (group,))


@pytest.mark.parametrize(
    ("tokens", "encoded"),
    [
        ((0, 1, 65535), "00000100ffff"),
        ((0, 65536, 151935), "0000000000017f5102"),
        ((2**24 - 1,), "ffffff"),
    ],
)
def test_tokens_take_two_bytes_or_if_one_needs_it_three(
    tokens: tuple[int, ...], encoded: str
) -> None:
    """The vectors of docs/protocols/rollout.md."""
    content = encode_groups((Group(7, (Completion(tokens, proof=b"p"),)),))
    length = struct.pack("<I", len(tokens))
    assert content == pack([[7, length, bytes.fromhex(encoded), b"\1\0\0\0", b"p"]])
    assert decode_groups_untrusted(content)[0].completions[0].tokens == tokens


def test_a_token_that_has_no_form_is_the_engines_mistake() -> None:
    with pytest.raises(ValueError, match="no form on the wire"):
        encode_groups((Group(7, (Completion((2**24,)),)),))


@pytest.mark.parametrize(
    ("length", "tokens", "sizes", "proofs", "match"),
    [
        (b"\5\0\0\0", bytes(8), b"\0" * 4, b"", "lengths of a group do not fit its tokens"),
        (b"\4\0\0\0", bytes(8), b"", b"", "one proof for each completion"),
        (b"\4\0\0\0", bytes(8), b"\3\0\0\0", b"no", "sizes of a group's proofs do not fit"),
        (b"\4\0\0\0", bytes(12), b"\0" * 4, b"", "fit two bytes have three"),
        (b"\1\0\2\0", bytes(8), b"\0" * 4, b"", "at most 131072 tokens"),
        (b"\4\0\0\0\0", bytes(8), b"\0" * 4, b"", "1 to 1024 completions"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    length: bytes, tokens: bytes, sizes: bytes, proofs: bytes, match: str
) -> None:
    with pytest.raises(BadMessage, match=match):
        decode_groups_untrusted(pack([[0, length, tokens, sizes, proofs]]))


@pytest.mark.parametrize("vocabulary", [49_152, 151_936])
def test_sixteen_answers_of_32768_tokens_pass_at_less_than_seven_bytes_a_token(
    vocabulary: int,
) -> None:
    """From the worker's content to what the trainer learns from."""
    size = WorkSize(
        groups=1, completions=16, tokens=32_768, vocabulary=vocabulary, proof_values=62
    )
    size.check()
    tokens = tuple(token % vocabulary for token in range(vocabulary - 1, vocabulary + 32_767))
    proof = bytes(proof_size(32_768, 576, 62))
    group = Group(MAX_INDEX, (Completion(tokens, proof=proof),) * 16)
    sent = submission(encode_groups((group,)))
    message = sent.to_bytes()
    assert size.max_submission - KI < len(message) <= size.max_submission < MAX_SUBMISSION
    assert size.max_submission < 7 * 16 * 32_768
    head = decode_head_untrusted(frame(message)[:KI])
    assert head is not None
    received = head.with_content_untrusted(sent.content)
    assert decode_groups_untrusted(received.content) == (group,)

    logprobs = struct.pack("<e", -1.5) * (16 * 32_768)
    verdict = SignedVerdict(
        VALIDATOR.peer_id, sent.commitment, Verdict.ACCEPTED, "", 0.0, 0.0, (1.0,) * 16,
        content_digest(logprobs),
    ).signed(VALIDATOR)  # fmt: skip
    delivery = AcceptedWork(verdict, received, logprobs).to_bytes()
    assert len(delivery) <= size.max_delivery
    work = decode_delivery_untrusted(delivery, verify)
    (learnt,) = decode_logprobs_untrusted(
        work.logprobs, decode_groups_untrusted(work.submission.content)
    )
    assert learnt.completions[15].tokens == tokens
    assert learnt.completions[15].logprobs == (-1.5,) * 32_768


@given(
    groups=st.integers(1, 300),
    completions=st.integers(1, 2000),
    tokens=st.integers(1, 200_000),
    vocabulary=st.sampled_from([50, 65_536, 65_537, 262_144]),
    proof_values=st.integers(8, 1024),
)
@settings(max_examples=200)
def test_a_recipe_that_does_not_fit_names_a_key_and_a_value_with_which_it_gets_on(
    **size: int,
) -> None:
    keys = {"submission": "groups", "group_size": "completions", "max_new_tokens": "tokens"}
    for _ in range(6):
        try:
            WorkSize(**size).check()
        except ValueError as error:
            found = re.search(
                r"at most (\d+) of (\w+)|lower (\w+) in .* at most (\d+)", str(error)
            )
            assert found is not None
            key, most = found[2] or found[3], int(found[1] or found[4])
            assert 0 < most < size[keys[key]]
            size[keys[key]] = most
        else:
            break
    WorkSize(**size).check()
