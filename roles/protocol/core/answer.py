"""Messages of `/shoal/work/1.0.0`: a worker's requests, and the replies of trainer and scorers.

A request is one frame ``[kind, body]``, and so is each reply. Content follows in a frame of its
own, after the reply `Word.SEND`. Decoders of requests leave signatures to their caller, who
first asks what costs less: run, terms, version, and who asks. Wire tables:
docs/protocols/work.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any, Final

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
from p2p.wire import KI, fields_untrusted, pack, unpack_untrusted
from roles.contract.core.sizes import MAX_SUBMISSION, MAX_VERDICT
from roles.protocol.core.account import Account, decode_account_untrusted
from roles.protocol.core.verdict import MAX_REASON, SignedVerdict, decode_verdict_untrusted
from roles.protocol.core.window import (
    DIGEST_BYTES,
    MAX_INDEX,
    MAX_PLACES,
    MAX_WINDOW,
    SignedWindow,
    decode_window_untrusted,
)

WORK_PROTOCOL: Final = ProtocolId("/shoal/work/1.0.0")
"""Protocol of windows, content, verdicts and contested verdicts."""
WORK_SINCE: Final = "0.2.0"
"""The first version of Shoal that speaks it, for people whose nodes meet an older one."""
ANSWER_DOMAIN: Final = ProtocolId("/shoal/work/answer/1.0.0")
"""Domain of a trainer's signature of an answer; no peer speaks it as a protocol."""
MAX_ANSWER: Final = 2 * KI
"""Bytes of a signed answer; it has about 400."""
MAX_CREDENTIAL: Final = 4 * KI
"""Bytes of a work stamp or an owner's invite."""
MAX_REQUEST: Final = MAX_VERDICT + MAX_WINDOW + 4 * KI
"""Bytes of a request without its content: the longest is a contested verdict."""
MAX_REPLY: Final = MAX_VERDICT + KI


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The trainer's answer to a window: the wanted places, and the worker's standing."""

    trainer: PeerId
    window: bytes
    """Digest of the window."""
    wanted: tuple[int, ...]
    """Indices of the places whose content is to come, ascending."""
    scorer: PeerId
    """Peer to which the content goes. No scorer takes content without this answer."""
    due: int
    """Seconds of the trainer's served time within which the content must come. After that it is
    overdue once the version is stale as well."""
    version: PolicyVersion
    """The newest version, under which places are wanted next."""
    wanted_next: int
    """Number of places that are wanted next."""
    is_newcomer: bool
    """True if the worker is a newcomer, so that nothing of this window is learnt from."""
    stood: int
    """Number of places of the worker that stood so far."""
    owed: int
    """Number of places that have to stand before the worker is in standing; 0 if it is."""
    account: Account
    signature: bytes = b""

    def body(self) -> bytes:
        """Return the bytes that are signed."""
        return pack(
            [
                *(self.trainer.digest, self.window, list(self.wanted), self.scorer.digest),
                *(self.due, self.version, self.wanted_next),
                *(self.is_newcomer, self.stood, self.owed, self.account.to_bytes()),
            ]
        )

    def signed(self, signer: Signer) -> Answer:
        """Return the answer with the trainer's signature."""
        return replace(self, signature=signer.sign(ANSWER_DOMAIN, self.body()))

    def to_bytes(self) -> bytes:
        """Return the wire form."""
        return pack([self.body(), self.signature])

    def has_valid_signature(self, verify: Verify) -> bool:
        """Return True if the trainer that the answer names has signed it. The caller must also
        check that it is the run's trainer."""
        return verify(self.trainer, ANSWER_DOMAIN, self.body(), self.signature)


def decode_answer_untrusted(data: bytes, verify: Verify | None) -> Answer:
    """Decode an answer; None for ``verify`` leaves the signature to the caller.

    Raises:
        BadMessage: The bytes are no answer, or its signature is not its trainer's.
    """
    if len(data) > MAX_ANSWER:
        raise BadMessage(f"an answer of {len(data)} bytes is over the limit of {MAX_ANSWER}")
    body, signature = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="answer")
    trainer, window, wanted, scorer, due, version, following, newcomer, stood, owed, account = (
        fields_untrusted(
            unpack_untrusted(body),
            *(bytes, bytes, list, bytes, int, int, int, bool, int, int, bytes),
            what="answer",
        )
    )
    if len(window) != DIGEST_BYTES or len(signature) != SIGNATURE_BYTES:
        raise BadMessage("a digest or signature of an answer is malformed")
    if len(wanted) > MAX_PLACES or not all(type(index) is int for index in wanted):
        raise BadMessage(f"an answer wants at most {MAX_PLACES} places")
    if not all(
        0 <= one <= MAX_INDEX for one in (*wanted, due, version, following, stood, owed)
    ):
        raise BadMessage(f"numbers of an answer are from 0 to {MAX_INDEX}")
    if any(one >= other for one, other in pairwise(wanted)):
        raise BadMessage("the places that an answer wants ascend")
    answer = Answer(
        trainer=decode_peer_id_untrusted(trainer),
        window=window,
        wanted=tuple(wanted),
        scorer=decode_peer_id_untrusted(scorer),
        due=due,
        version=PolicyVersion(version),
        wanted_next=following,
        is_newcomer=newcomer,
        stood=stood,
        owed=owed,
        account=decode_account_untrusted(account),
        signature=signature,
    )
    if verify is not None and not answer.has_valid_signature(verify):
        raise BadMessage("an answer's signature is not its trainer's")
    return answer


@dataclass(frozen=True, slots=True)
class WindowRequest:
    """Worker to trainer: a window. The reply is an `Answer`, or `Refused`."""

    KIND = "window"
    signed: SignedWindow
    credential: bytes = b""
    """A newcomer's work stamp, or the owner's invite."""

    def body(self) -> bytes:
        """Return the body of the request."""
        return pack([self.signed.to_bytes(), self.credential])


@dataclass(frozen=True, slots=True)
class ContentRequest:
    """Worker to scorer: content that the answer wants. The reply is `Word.SEND`, and after the
    content, or at once where it is known, a `SignedVerdict`; or `Refused`."""

    KIND = "content"
    signed: SignedWindow
    answer: Answer
    index: int
    length: int
    """Bytes of the content; 0 says that the content is lost, so that nobody waits for it."""

    def body(self) -> bytes:
        """Return the body of the request."""
        return pack([self.signed.to_bytes(), self.answer.to_bytes(), self.index, self.length])


@dataclass(frozen=True, slots=True)
class VerdictRequest:
    """Validator to trainer: a verdict. The reply is `Word.TAKEN`, or `Word.SEND` if the trainer
    repeats it: the encoded `Submission` follows, then `Word.TAKEN`; or `Refused`."""

    KIND = "verdict"
    verdict: SignedVerdict

    def body(self) -> bytes:
        """Return the body of the request."""
        return self.verdict.to_bytes()


@dataclass(frozen=True, slots=True)
class ContestRequest:
    """Worker to trainer: a validator's rejection is wrong. The reply is `Word.NOTED`, or
    `Word.SEND`: the encoded `Submission` follows, then `Word.TAKEN`; or `Refused`."""

    KIND = "contest"
    verdict: SignedVerdict
    signed: SignedWindow

    def body(self) -> bytes:
        """Return the body of the request."""
        return pack([self.verdict.to_bytes(), self.signed.to_bytes()])


@dataclass(frozen=True, slots=True)
class AccountRequest:
    """Any peer to trainer: asks for the state of the run and of the peer's own work. The reply
    is an `Account`."""

    KIND = "account"
    with_curve: bool = False
    """True if the reply should have the curve. Older trainers read no body and send no
    curve."""

    def body(self) -> bytes:
        """Return the body of the request."""
        return b"curve" if self.with_curve else b""


Request = WindowRequest | ContentRequest | VerdictRequest | ContestRequest | AccountRequest


def encode_request(request: Request) -> bytes:
    """Return the wire form of a request."""
    return pack([request.KIND, request.body()])


def decode_request_untrusted(data: bytes) -> Request:
    """Decode a request, whose signatures the caller has to check.

    Raises:
        BadMessage: The bytes are no request, or its parts do not belong together.
    """
    kind, body = fields_untrusted(unpack_untrusted(data), str, bytes, what="request")
    decode = _REQUESTS.get(kind)
    if decode is None:
        raise BadMessage(f"{kind[:20]!r} is no request for work")
    return decode(body)


def _decode_window_untrusted(body: bytes) -> WindowRequest:
    raw, credential = fields_untrusted(unpack_untrusted(body), bytes, bytes, what="request")
    if len(credential) > MAX_CREDENTIAL:
        raise BadMessage(f"a stamp or invite has at most {MAX_CREDENTIAL} bytes")
    return WindowRequest(decode_window_untrusted(raw, None), credential)


def _decode_content_untrusted(body: bytes) -> ContentRequest:
    raw_window, raw_answer, index, length = fields_untrusted(
        unpack_untrusted(body), bytes, bytes, int, int, what="request"
    )
    answer = decode_answer_untrusted(raw_answer, None)
    signed = decode_window_untrusted(raw_window, None)
    if answer.window != signed.window.digest:
        raise BadMessage("the answer is about another window")
    if index not in signed.window.places or index not in answer.wanted:
        raise BadMessage("the answer does not want this place")
    if not 0 <= length <= MAX_SUBMISSION:
        raise BadMessage(f"content has at most {MAX_SUBMISSION} bytes")
    return ContentRequest(signed, answer, index, length)


def _decode_verdict_untrusted(body: bytes) -> VerdictRequest:
    return VerdictRequest(decode_verdict_untrusted(body, None))


def _decode_contest_untrusted(body: bytes) -> ContestRequest:
    raw_verdict, raw_window = fields_untrusted(
        unpack_untrusted(body), bytes, bytes, what="request"
    )
    verdict = decode_verdict_untrusted(raw_verdict, None)
    signed = decode_window_untrusted(raw_window, None)
    index = verdict.commitment.index
    if (
        index not in signed.window.places
        or signed.window.commitment(index) != verdict.commitment
    ):
        raise BadMessage("the verdict is about a place of another window")
    return ContestRequest(verdict, signed)


_REQUESTS: Final[Mapping[str, Callable[[bytes], Request]]] = {
    WindowRequest.KIND: _decode_window_untrusted,
    ContentRequest.KIND: _decode_content_untrusted,
    VerdictRequest.KIND: _decode_verdict_untrusted,
    ContestRequest.KIND: _decode_contest_untrusted,
    AccountRequest.KIND: lambda body: AccountRequest(with_curve=body == b"curve"),
}


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal of a request, with the reason. It changes nothing and blames nobody."""

    reason: str
    retry: bool
    """True if the same request may succeed later."""
    next: int = -1
    """Place that the worker has to commit next under this version; -1 if the place was not the
    problem."""


class Word(Enum):
    """A reply without a body."""

    SEND = "send"
    """The content has to follow."""
    TAKEN = "taken"
    """The message was taken, and the sender may forget it."""
    NOTED = "noted"
    """The contest is noted, but the budget for contested verdicts is spent: ask again in a
    minute."""


Reply = Answer | SignedVerdict | Refused | Word | Account


def encode_reply(reply: Reply) -> bytes:
    """Return the wire form of a reply."""
    match reply:
        case Word():
            return pack([reply.value, b""])
        case Answer():
            return pack(["answer", reply.to_bytes()])
        case SignedVerdict():
            return pack(["verdict", reply.to_bytes()])
        case Account():
            return pack(["account", reply.to_bytes()])
        case Refused():
            body = pack([reply.reason[:MAX_REASON], reply.retry, reply.next])
            return pack(["refused", body])


def decode_reply_untrusted(data: bytes, verify: Verify | None) -> Reply:
    """Decode a reply; None for ``verify`` leaves signatures to the caller.

    Raises:
        BadMessage: The bytes are no reply.
    """
    kind, body = fields_untrusted(unpack_untrusted(data), str, bytes, what="reply")
    match kind:
        case "answer":
            return decode_answer_untrusted(body, verify)
        case "verdict":
            return decode_verdict_untrusted(body, verify)
        case "account":
            return decode_account_untrusted(body)
        case "refused":
            return _decode_refused_untrusted(unpack_untrusted(body))
    try:
        return Word(kind)
    except ValueError:
        raise BadMessage(f"{kind[:20]!r} is no reply to a request for work") from None


def _decode_refused_untrusted(value: Any) -> Refused:
    reason, retry, following = fields_untrusted(value, str, bool, int, what="refusal")
    if not -1 <= following <= MAX_INDEX:
        raise BadMessage(f"the index of a place is from 0 to {MAX_INDEX}")
    return Refused(reason[:MAX_REASON], retry, following)
