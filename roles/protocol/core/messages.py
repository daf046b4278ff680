"""What generators, validators and trainers say to each other: submissions, verdicts, replies.

A *submission* is the groups one node drew in one go under one policy, behind a signed
*commitment* that binds run, node, policy, place in the draw order and content. A *verdict* is a
validator's signed answer, and the worker's receipt. Wire tables: docs/protocols/rollout.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
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
from p2p.wire import KI, MIB, decode_varint_untrusted, fields_untrusted, pack, unpack_untrusted
from proofs.checks import Verdict
from roles.engines.base import Completion, Group

ROLLOUT_PROTOCOL: Final = ProtocolId("/shoal/rollout/1.0.0")
"""Worker asks, validator answers with a verdict. Also the domain of commitments."""
VERDICT_PROTOCOL: Final = ProtocolId("/shoal/proof/1.0.0")
"""Validator hands accepted submissions to the trainer. Also the domain of verdicts."""

MAX_SUBMISSION: Final = 8 * MIB
"""Bytes. 64 groups of 16 answers of 1,000 tokens at 8 bytes each: more is sent as several."""
MAX_DELIVERY: Final = MAX_SUBMISSION + 128 * KI
"""Bytes: a submission, and a verdict of at most one ledger entry."""
MAX_VERDICT: Final = 64 * KI
"""Bytes: a verdict goes into one ledger entry (`p2p.ledger.core.chain.MAX_BODY`)."""
MAX_REPLY: Final = MAX_VERDICT + KI
"""Bytes of what a validator answers."""
MAX_RECEIPT: Final = KI
"""Bytes of what a trainer answers: a word and a sentence."""
DECODE_RATE: Final = 40e6
"""Bytes of a submission's content that are decoded and looked at in a second, one core."""
HASH_RATE: Final = 1e9
"""Bytes of a submission that are hashed and copied in a second, one core."""
MAX_GROUPS: Final = 256
"""Groups of one submission: a verdict comes for all of them together, so a larger one would
only be judged later."""
MAX_COMPLETIONS: Final = 1024
"""Per group: 64 times INTELLECT-2's 16. More teach little: the mean of a group is known to a
thirtieth by then."""
MAX_TOKENS: Final = 128 * 1024
"""Per completion: the longest context in use."""
MAX_INDEX: Final = 2**32 - 1
"""The highest place in a draw order: 136 years of one submission a second."""
DIGEST_BYTES: Final = 32
"""SHA-256 and BLAKE3 alike."""
MAX_REASON: Final = 200
"""Characters of a verdict's reason, or of a refusal: a sentence, which a worker's operator
reads on one line."""
MAX_HEAD: Final = KI
"""Bytes in front of a submission's content: the commitment has about 190, its signature 64."""
TOO_LONG: Final = "the submission is too long"
"""Beginning of the reason of a verdict on work of which no more than the head was read."""
_SUBMISSION: Final = b"\x93"
"""msgpack: a list of three."""
_BINARY: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
"""msgpack: the three kinds of `bin`, and the bytes of their lengths."""
_GROUP_FIELDS: Final = 6
_TOKEN_BYTES: Final = 24
"""Per token: 4 as such, 4 for its log-prob, 8 of the proof over it, and half as much again."""
_COMPLETION_BYTES: Final = 512
"""Per completion: the proof's last, started chunk (258) and two lengths, and half as much
again."""
_GROUP_BYTES: Final = KI
"""Per group: its number and the heads of its fields, rounded up a lot."""


def max_submission(groups: int, completions: int, tokens: int) -> int:
    """Bytes of the longest submission of a run: ``groups`` of ``completions`` of at most
    ``tokens`` tokens.

    The demo's has 172 KiB at most, a fiftieth of `MAX_SUBMISSION`: so much less can be held by
    strangers that each begin one.
    """
    completion = _COMPLETION_BYTES + tokens * _TOKEN_BYTES
    longest = 64 * KI + groups * (_GROUP_BYTES + completions * completion)
    return min(MAX_SUBMISSION, longest)


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
    logprobs = [value for completion in group.completions for value in completion.logprobs]
    proofs = [completion.proof for completion in group.completions]
    return [
        group.group,
        struct.pack(f"<{len(lengths)}I", *lengths),
        struct.pack(f"<{len(tokens)}I", *tokens),
        struct.pack(f"<{len(logprobs)}f", *logprobs),
        struct.pack(f"<{len(proofs)}I", *map(len, proofs)),
        b"".join(proofs),
    ]


def decode_groups_untrusted(content: bytes) -> tuple[Group, ...]:
    """Raise `BadMessage`, and nothing else, whatever the bytes."""
    listed = unpack_untrusted(
        content, max_items=MAX_GROUPS * (2 + _GROUP_FIELDS), max_list=MAX_GROUPS
    )
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_GROUPS:
        raise BadMessage(f"a submission has 1 to {MAX_GROUPS} groups")
    return tuple(_decode_group_untrusted(item) for item in listed)


def _decode_group_untrusted(item: object) -> Group:
    number, raw_lengths, raw_tokens, raw_logprobs, raw_sizes, proofs = fields_untrusted(
        item, int, bytes, bytes, bytes, bytes, bytes, what="group"
    )
    _number_untrusted(number, MAX_INDEX, "a group number")
    if len(raw_lengths) % 4 or not 0 < len(raw_lengths) <= 4 * MAX_COMPLETIONS:
        raise BadMessage(f"a group has 1 to {MAX_COMPLETIONS} completions")
    lengths = struct.unpack(f"<{len(raw_lengths) // 4}I", raw_lengths)
    total = sum(lengths)
    if (
        max(lengths) > MAX_TOKENS
        or len(raw_tokens) != 4 * total
        or len(raw_logprobs) != 4 * total
    ):
        raise BadMessage("the lengths of a group do not fit its tokens and log-probs")
    if len(raw_sizes) != len(raw_lengths):
        raise BadMessage("a group has one proof for each completion")
    sizes = struct.unpack(f"<{len(lengths)}I", raw_sizes)
    if len(proofs) != sum(sizes):
        raise BadMessage("the sizes of a group's proofs do not fit them")
    tokens = struct.unpack(f"<{total}I", raw_tokens)
    logprobs = struct.unpack(f"<{total}f", raw_logprobs)
    completions = []
    start = proven = 0
    for length, size in zip(lengths, sizes, strict=True):
        completions.append(
            Completion(
                tokens[start : start + length],
                logprobs[start : start + length],
                proofs[proven : proven + size],
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
    signature: bytes = b""

    def body(self) -> bytes:
        """What is signed."""
        return pack(
            [
                self.validator.digest,
                self.commitment.to_bytes(),
                self.verdict.value,
                self.reason,
                self.statistic,
                self.limit,
                struct.pack(f"<{len(self.rewards)}f", *self.rewards),
            ]
        )

    def signed(self, signer: Signer) -> SignedVerdict:
        """The same, with the validator's signature."""
        signature = signer.sign(VERDICT_PROTOCOL, self.body())
        return SignedVerdict(
            self.validator, self.commitment, self.verdict, self.reason, self.statistic,
            self.limit, self.rewards, signature,
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        """The wire and ledger form."""
        return pack([self.body(), self.signature])


def decode_verdict_untrusted(data: bytes, verify: Verify) -> SignedVerdict:
    """Raise `BadMessage` unless it is whole and its signature the validator's."""
    if len(data) > MAX_VERDICT:
        raise BadMessage(f"a verdict of {len(data)} bytes is over the limit of {MAX_VERDICT}")
    body, signature = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="verdict")
    validator, commitment, verdict, reason, statistic, limit, rewards = fields_untrusted(
        unpack_untrusted(body), bytes, bytes, str, str, float, float, bytes, what="verdict body"
    )
    if len(reason) > MAX_REASON or len(rewards) % 4:
        raise BadMessage("a verdict's reason or rewards are malformed")
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
        signature,
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was not served, in one sentence: no verdict, and no blame."""

    reason: str
    retry: bool
    """Whether the same request may succeed later."""


def encode_reply(reply: SignedVerdict | Refusal) -> bytes:
    """The answer on `ROLLOUT_PROTOCOL`."""
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


def encode_delivery(verdict: SignedVerdict, submission: Submission) -> bytes:
    """What a validator hands to a trainer on `VERDICT_PROTOCOL`."""
    return pack([verdict.to_bytes(), submission.to_bytes()])


def decode_delivery_untrusted(data: bytes, verify: Verify) -> tuple[SignedVerdict, Submission]:
    """Raise `BadMessage` unless both parts are valid and belong together."""
    raw_verdict, raw_submission = fields_untrusted(
        unpack_untrusted(data), bytes, bytes, what="delivery"
    )
    verdict = decode_verdict_untrusted(raw_verdict, verify)
    submission = decode_submission_untrusted(raw_submission, verify)
    if verdict.commitment != submission.commitment:
        raise BadMessage("a delivery's verdict is about another submission")
    return verdict, submission


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
