"""What generators, validators and trainers say to each other: submissions, verdicts, replies.

A *submission* is the groups one node drew in one go under one policy, behind a signed
*commitment* that binds run, node, policy, place in the draw order and content. A *verdict* is a
validator's signed answer, and the worker's receipt. Wire tables: docs/protocols/rollout.md.
"""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, dataclass, replace
from enum import Enum
from functools import cache
from typing import Final

from blake3 import blake3

from p2p.errors import BadMessage
from p2p.identity import (
    SIGNATURE_BYTES,
    PeerId,
    ProtocolId,
    Signer,
    Verify,
    decode_peer_id_untrusted,
)
from p2p.shardcast.manifest import PolicyVersion
from p2p.wire import (
    KI,
    decode_varint_untrusted,
    fields_untrusted,
    frame,
    pack,
    unpack_untrusted,
)
from proofs.checks import Verdict
from roles.engines.base import Completion, Group
from roles.protocol.core.work import Work, decode_work_untrusted
from roles.shared.sizes import (
    LOGPROB_BYTES,
    MAX_COMPLETIONS,
    MAX_GROUPS,
    MAX_HEAD,
    MAX_TOKEN,
    MAX_TOKENS,
    MAX_VERDICT,
    SHORT_TOKENS,
)

ROLLOUT_PROTOCOL: Final = ProtocolId("/shoal/rollout/1.0.0")
"""Worker asks, validator answers with a verdict. Also the domain of commitments."""
OFFER_PROTOCOL: Final = ProtocolId("/shoal/offer/1.0.0")
"""The same question, whose content follows only if the validator sends for it (`SEND`)."""
VERDICT_PROTOCOL: Final = ProtocolId("/shoal/proof/1.0.0")
"""Validator hands accepted submissions to the trainer. Also the domain of verdicts."""

MAX_REPLY: Final = MAX_VERDICT + KI
"""Bytes of what a validator answers."""
MAX_RECEIPT: Final = KI
"""Bytes of what a trainer answers: a word and a sentence."""
DECODE_RATE: Final = 40e6
"""Bytes of a submission's content that are decoded and looked at in a second, one core: 3.1 MB,
16 answers of 32,768 tokens, take 0.1 s."""
HASH_RATE: Final = 1e9
"""Bytes of a submission that are hashed and copied in a second, one core."""
MAX_INDEX: Final = 2**32 - 1
"""The highest place in a draw order: 136 years of one submission a second."""
DIGEST_BYTES: Final = 32
"""SHA-256 and BLAKE3 alike."""
MAX_REASON: Final = 200
"""Characters of a verdict's reason, or of a refusal: a sentence, which a worker's operator
reads on one line."""
NOT_JUDGED_YET: Final = "not judged yet"
"""What a validator answers that has the work and no verdict on it: the worker asks again."""
TOO_LONG: Final = "the submission is too long"
"""Beginning of the reason of a verdict on work of which no more than the head was read."""
LIED: Final = "this validator signed what a replay shows to be false"
"""Beginning of what a trainer answers to a validator that it has convicted."""
_SUBMISSION: Final = b"\x93"
"""msgpack: a list of three."""
_BINARY: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
"""msgpack: the three kinds of `bin`, and the bytes of their lengths."""
_GROUP_FIELDS: Final = 5
_VERDICT_FIELDS: Final = (bytes, bytes, str, str, float, float, bytes, bytes)
"""The types of a verdict's fields; a count of work may follow."""


def _digest_untrusted(value: bytes, what: str) -> bytes:
    if len(value) != DIGEST_BYTES:
        raise BadMessage(f"a {what} is {DIGEST_BYTES} bytes, not {len(value)}")
    return value


def _number_untrusted(value: int, limit: int, what: str) -> int:
    if not 0 <= value <= limit:
        raise BadMessage(f"{what} must be from 0 to {limit}")
    return value


def encode_groups(groups: tuple[Group, ...]) -> bytes:
    """The content of a submission: what its digest is taken of."""
    return pack([_encode_group(group) for group in groups])


def _encode_group(group: Group) -> list[object]:
    lengths = [len(completion.tokens) for completion in group.completions]
    tokens = [token for completion in group.completions for token in completion.tokens]
    proofs = [completion.proof for completion in group.completions]
    return [
        group.group,
        struct.pack(f"<{len(lengths)}I", *lengths),
        _encode_tokens(tokens),
        struct.pack(f"<{len(proofs)}I", *map(len, proofs)),
        b"".join(proofs),
    ]


def _encode_tokens(tokens: list[int]) -> bytes:
    """Two bytes each, or, if one of them needs it, three."""
    highest = max(tokens, default=0)
    if highest > MAX_TOKEN:
        raise ValueError(f"a token of {highest} has no form on the wire")
    if highest < SHORT_TOKENS:
        return struct.pack(f"<{len(tokens)}H", *tokens)
    words = struct.pack(f"<{len(tokens)}I", *tokens)
    encoded = bytearray(3 * len(tokens))
    for byte in range(3):
        encoded[byte::3] = words[byte::4]
    return bytes(encoded)


def _decode_tokens_untrusted(data: bytes, count: int) -> tuple[int, ...]:
    """Raise `BadMessage` unless they are ``count`` tokens in their one form."""
    if len(data) == 2 * count:
        return _shared(struct.unpack(f"<{count}H", data))
    if len(data) != 3 * count:
        raise BadMessage("the lengths of a group do not fit its tokens")
    words = bytearray(4 * count)
    for byte in range(3):
        words[byte::4] = data[byte::3]
    tokens = struct.unpack(f"<{count}I", words)
    if max(tokens, default=0) < SHORT_TOKENS:
        raise BadMessage("tokens that fit two bytes have three")
    return _shared(tokens)


def _shared(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The same, with one object for each of equal tokens: 8 bytes a token instead of 40. A
    trainer's buffer holds some ten million."""
    objects: dict[int, int] = {}
    return tuple(map(objects.setdefault, tokens, tokens))


def decode_groups_untrusted(content: bytes) -> tuple[Group, ...]:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    listed = unpack_untrusted(
        content, max_items=MAX_GROUPS * (2 + _GROUP_FIELDS), max_list=MAX_GROUPS
    )
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_GROUPS:
        raise BadMessage(f"a submission has 1 to {MAX_GROUPS} groups")
    return tuple(_decode_group_untrusted(item) for item in listed)


def _decode_group_untrusted(item: object) -> Group:
    number, raw_lengths, raw_tokens, raw_sizes, proofs = fields_untrusted(
        item, int, bytes, bytes, bytes, bytes, what="group"
    )
    _number_untrusted(number, MAX_INDEX, "a group number")
    if len(raw_lengths) % 4 or not 0 < len(raw_lengths) <= 4 * MAX_COMPLETIONS:
        raise BadMessage(f"a group has 1 to {MAX_COMPLETIONS} completions")
    lengths = struct.unpack(f"<{len(raw_lengths) // 4}I", raw_lengths)
    if max(lengths) > MAX_TOKENS:
        raise BadMessage(f"a completion has at most {MAX_TOKENS} tokens")
    tokens = _decode_tokens_untrusted(raw_tokens, sum(lengths))
    if len(raw_sizes) != len(raw_lengths):
        raise BadMessage("a group has one proof for each completion")
    sizes = struct.unpack(f"<{len(lengths)}I", raw_sizes)
    if len(proofs) != sum(sizes):
        raise BadMessage("the sizes of a group's proofs do not fit them")
    completions = []
    start = proven = 0
    for length, size in zip(lengths, sizes, strict=True):
        completions.append(
            Completion(
                tokens=tokens[start : start + length],
                proof=proofs[proven : proven + size],
            )
        )
        start, proven = start + length, proven + size
    return Group(number, tuple(completions))


@dataclass(frozen=True, slots=True)
class Commitment:
    """What a worker signs: whose groups these are, under which policy, which place in the
    order."""

    run: bytes
    node: PeerId
    version: PolicyVersion
    policy: bytes
    """Digest of the weights, so that a version number alone proves nothing."""
    index: int
    """The how manyeth submission of this node under this policy, from 0, without gaps."""
    content: bytes
    """blake3 of the encoded groups."""

    def to_bytes(self) -> bytes:
        """What is signed."""
        return pack(
            [self.run, self.node.digest, self.version, self.policy, self.index, self.content]
        )


def decode_commitment_untrusted(data: bytes) -> Commitment:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    run, node, version, policy, index, content = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, int, bytes, int, bytes, what="commitment"
    )
    return Commitment(
        _digest_untrusted(run, "run id"),
        decode_peer_id_untrusted(node),
        PolicyVersion(_number_untrusted(version, MAX_INDEX, "a policy version")),
        _digest_untrusted(policy, "policy digest"),
        _number_untrusted(index, MAX_INDEX, "a submission index"),
        _digest_untrusted(content, "content digest"),
    )


@dataclass(frozen=True, slots=True)
class Submission:
    """A commitment, its signature, and the encoded groups it binds."""

    commitment: Commitment
    signature: bytes
    content: bytes

    @classmethod
    def sign(cls, commitment: Commitment, content: bytes, signer: Signer) -> Submission:
        """Sign ``commitment`` in the worker's name."""
        return cls(commitment, signer.sign(ROLLOUT_PROTOCOL, commitment.to_bytes()), content)

    def to_bytes(self) -> bytes:
        """The wire form."""
        return pack([self.commitment.to_bytes(), self.signature, self.content])

    def framed(self) -> tuple[bytes, bytes]:
        """The wire form, with its length: what a validator answers an offer by, and the content
        that it may send for."""
        data = frame(self.to_bytes())
        return data[: len(data) - len(self.content)], self.content


def content_digest(content: bytes) -> bytes:
    """The 32 bytes that a commitment binds."""
    digest: bytes = blake3(content).digest()
    return digest


@dataclass(frozen=True, slots=True)
class SubmissionHead:
    """What stands in front of a submission's content, and how much content there is to come."""

    commitment: Commitment
    signed: bytes
    """The commitment as it was signed."""
    signature: bytes
    content_bytes: int
    total: int
    """Bytes of the whole message."""
    begun: bytes
    """The content, as far as it came with the head."""

    def check_signature(self, verify: Verify) -> None:
        """Raise `BadMessage` unless the signature is the node's."""
        _check_signature(self.commitment, self.signed, self.signature, verify)

    def with_content_untrusted(self, content: bytes) -> Submission:
        """The whole submission. Raise `BadMessage` unless ``content`` is the one committed
        to."""
        return _with_content(self.commitment, self.signature, content)


def decode_head_untrusted(data: bytes) -> SubmissionHead | None:
    """Read the beginning of a framed submission, or None while it is incomplete.

    Raise `BadMessage`, and nothing else, whatever the bytes; also if the head is longer than
    `MAX_HEAD`.
    """
    frame_head = decode_varint_untrusted(data)
    if frame_head is None:
        return None
    total, start = frame_head
    if data[start : start + 1] not in (b"", _SUBMISSION):
        raise BadMessage("a submission is a list of three")
    raw_commitment = _binary_head(data, start + 1)
    raw_signature = None if raw_commitment is None else _binary_head(data, sum(raw_commitment))
    raw_content = None if raw_signature is None else _binary_head(data, sum(raw_signature))
    if raw_commitment is None or raw_signature is None or raw_content is None:
        if len(data) >= MAX_HEAD:
            raise BadMessage(f"the head of a submission is longer than {MAX_HEAD} bytes")
        return None
    at, length = raw_content
    if at > MAX_HEAD:
        raise BadMessage(f"the head of a submission is longer than {MAX_HEAD} bytes")
    if at + length != start + total:
        raise BadMessage("the lengths of a submission contradict each other")
    signed = data[raw_commitment[0] : sum(raw_commitment)]
    signature = data[raw_signature[0] : sum(raw_signature)]
    if len(data) > at + length:
        raise BadMessage("something follows a submission")
    return SubmissionHead(
        decode_commitment_untrusted(signed), signed, signature, length, total, data[at:]
    )


def _binary_head(data: bytes, at: int) -> tuple[int, int] | None:
    """Where the msgpack `bin` at ``at`` begins, and how long it is; None while its head is
    incomplete."""
    if at >= len(data):
        return None
    width = _BINARY.get(data[at])
    if width is None:
        raise BadMessage("the parts of a submission are bytes")
    start = at + 1 + width
    return None if len(data) < start else (start, int.from_bytes(data[at + 1 : start], "big"))


def decode_submission_untrusted(data: bytes, verify: Verify) -> Submission:
    """Raise `BadMessage` unless it is whole, its signature right and its content the one
    committed to.

    The groups stay encoded: `decode_groups_untrusted` opens them.
    """
    head, signature, content = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, bytes, what="submission"
    )
    commitment = decode_commitment_untrusted(head)
    _check_signature(commitment, head, signature, verify)
    return _with_content(commitment, signature, content)


def _check_signature(
    commitment: Commitment, signed: bytes, signature: bytes, verify: Verify
) -> None:
    if len(signature) != SIGNATURE_BYTES or not verify(
        commitment.node, ROLLOUT_PROTOCOL, signed, signature
    ):
        raise BadMessage("a submission's signature is not its node's")


def _with_content(commitment: Commitment, signature: bytes, content: bytes) -> Submission:
    if content_digest(content) != commitment.content:
        raise BadMessage("a submission's content is not what its commitment binds")
    return Submission(commitment, signature, content)


@dataclass(frozen=True, slots=True)
class SignedVerdict:
    """A validator's answer to one submission; for the worker it is the receipt."""

    validator: PeerId
    commitment: Commitment
    verdict: Verdict
    reason: str
    statistic: float
    limit: float
    rewards: tuple[float, ...]
    """Recomputed, one per completion in order; empty unless accepted."""
    logprobs: bytes = b""
    """Digest of the log-probs that the trainer gets with it; empty unless accepted."""
    signature: bytes = b""
    work: Work | None = None
    """How much it was to draw, by the validator's count; None unless accepted, and in verdicts
    of versions that did not count."""

    def body(self) -> bytes:
        """What is signed."""
        fields = [
            self.validator.digest,
            self.commitment.to_bytes(),
            self.verdict.value,
            self.reason,
            self.statistic,
            self.limit,
            struct.pack(f"<{len(self.rewards)}f", *self.rewards),
            self.logprobs,
        ]
        return pack(fields if self.work is None else [*fields, list(astuple(self.work))])

    def signed(self, signer: Signer) -> SignedVerdict:
        """The same, with the validator's signature."""
        signature = signer.sign(VERDICT_PROTOCOL, self.body())
        return replace(self, signature=signature)

    def to_bytes(self) -> bytes:
        """The wire and ledger form."""
        return pack([self.body(), self.signature])


def decode_verdict_untrusted(data: bytes, verify: Verify) -> SignedVerdict:
    """Raise `BadMessage` unless it is whole and its signature the validator's."""
    if len(data) > MAX_VERDICT:
        raise BadMessage(f"a verdict of {len(data)} bytes is over the limit of {MAX_VERDICT}")
    body, signature = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="verdict")
    unpacked = unpack_untrusted(body)
    is_counted = isinstance(unpacked, list) and len(unpacked) > len(_VERDICT_FIELDS)
    kinds = (*_VERDICT_FIELDS, list) if is_counted else _VERDICT_FIELDS
    fields = fields_untrusted(unpacked, *kinds, what="verdict body")
    validator, commitment, verdict, reason, statistic, limit, rewards, logprobs, *work = fields
    if len(reason) > MAX_REASON or len(rewards) % 4 or len(logprobs) not in (0, DIGEST_BYTES):
        raise BadMessage("a verdict's reason, rewards or log-probs are malformed")
    try:
        kind = Verdict(verdict)
    except ValueError:
        raise BadMessage(f"{verdict[:20]!r} is no verdict") from None
    author = decode_peer_id_untrusted(validator)
    if len(signature) != SIGNATURE_BYTES or not verify(
        author, VERDICT_PROTOCOL, body, signature
    ):
        raise BadMessage("a verdict's signature is not its validator's")
    scores = struct.unpack(f"<{len(rewards) // 4}f", rewards)
    return SignedVerdict(
        author,
        decode_commitment_untrusted(commitment),
        kind,
        reason,
        statistic,
        limit,
        scores,
        logprobs,
        signature,
        decode_work_untrusted(work[0]) if work else None,
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not served, in one sentence: no verdict, and no blame."""

    reason: str
    retry: bool
    """Whether the same request may succeed later."""


SEND: Final = pack(["send", b""])
"""The first answer on `OFFER_PROTOCOL`, if the content is to follow; another is the last."""


def encode_reply(reply: SignedVerdict | Refusal) -> bytes:
    """The answer on `ROLLOUT_PROTOCOL`, the last on `OFFER_PROTOCOL`."""
    if isinstance(reply, SignedVerdict):
        return pack(["verdict", reply.to_bytes()])
    return pack(["refused", pack([reply.reason, reply.retry])])


def decode_reply_untrusted(data: bytes, verify: Verify) -> SignedVerdict | Refusal:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    kind, body = fields_untrusted(unpack_untrusted(data), str, bytes, what="reply")
    if kind == "verdict":
        return decode_verdict_untrusted(body, verify)
    if kind != "refused":
        raise BadMessage(f"{kind[:20]!r} is no reply")
    reason, retry = fields_untrusted(unpack_untrusted(body), str, bool, what="refusal")
    return Refusal(reason[:MAX_REASON], retry)


@dataclass(frozen=True, slots=True)
class AcceptedWork:
    """What a validator hands to a trainer on `VERDICT_PROTOCOL`."""

    verdict: SignedVerdict
    submission: Submission
    logprobs: bytes
    """The validator's own, of all tokens in order (`roles.engines.base.Scored`): by them the
    trainer weighs what the policy of the draw made of each. The verdict binds them."""

    def to_bytes(self) -> bytes:
        """The wire form, and that on disk."""
        return pack([self.verdict.to_bytes(), self.submission.to_bytes(), self.logprobs])


def decode_delivery_untrusted(data: bytes, verify: Verify) -> AcceptedWork:
    """Raise `BadMessage` unless all parts are valid and belong together."""
    raw_verdict, raw_submission, logprobs = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, bytes, what="delivery"
    )
    verdict = decode_verdict_untrusted(raw_verdict, verify)
    submission = decode_submission_untrusted(raw_submission, verify)
    if verdict.commitment != submission.commitment:
        raise BadMessage("a delivery's verdict is about another submission")
    if verdict.logprobs != content_digest(logprobs):
        raise BadMessage("a delivery's log-probs are not those of its verdict")
    return AcceptedWork(verdict, submission, logprobs)


@cache
def _logprobs_by_pattern() -> dict[int, float]:
    """What each pattern of 16 bits stands for that is finite and not above 0; shared, as tokens
    are (`_shared`)."""
    values = struct.unpack("<65536e", struct.pack("<65536H", *range(65536)))
    # NaN is in no order with any number
    return {pattern: one for pattern, one in enumerate(values) if -math.inf < one <= 0}


def decode_logprobs_untrusted(data: bytes, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """The groups with these log-probs, one for each token. Raise `BadMessage` unless they are
    as many, finite and not above 0."""
    count = sum(len(one.tokens) for group in groups for one in group.completions)
    if len(data) != LOGPROB_BYTES * count:
        raise BadMessage(f"{len(data)} bytes of log-probs for {count} tokens")
    patterns, numbers = struct.unpack(f"<{count}H", data), _logprobs_by_pattern()
    if not numbers.keys() >= set(patterns):
        raise BadMessage("a log-prob is not finite, or above 0")
    values = tuple(map(numbers.__getitem__, patterns))
    held = []
    start = 0
    for group in groups:
        completions = []
        for one in group.completions:
            end = start + len(one.tokens)
            completions.append(Completion(one.tokens, values[start:end], one.proof))
            start = end
        held.append(Group(group.group, tuple(completions)))
    return tuple(held)


class Receipt(Enum):
    """A trainer's answer to a delivery."""

    TAKEN = "taken"
    """It is on the trainer's disk: the validator may forget it."""
    UNWANTED = "unwanted"
    """The trainer has no use for it, and never will: forget it."""
    LATER = "later"
    """There is no room now: keep it, and ask again."""


def encode_receipt(receipt: Receipt, reason: str) -> bytes:
    """The answer on `VERDICT_PROTOCOL`, with one sentence."""
    return pack([receipt.value, reason])


def decode_receipt_untrusted(data: bytes) -> tuple[Receipt, str]:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    value, reason = fields_untrusted(unpack_untrusted(data), str, str, what="answer")
    try:
        return Receipt(value), reason[:MAX_REASON]
    except ValueError:
        raise BadMessage(f"{value[:20]!r} is no answer to a delivery") from None
