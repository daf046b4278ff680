"""Windows, verdicts and answers for tests of the work protocol."""

from __future__ import annotations

from collections.abc import Sequence

from p2p.identity import KeyPair
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import Reason, Verdict
from roles.protocol.core.account import Account, Fates, TrainerDoing
from roles.protocol.core.answer import Answer
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import (
    Claim,
    Commitment,
    SignedWindow,
    Submission,
    Window,
    content_digest,
)

RUN, TERMS, POLICY = b"r" * 32, b"t" * 32, b"p" * 32


def key(number: int, kind: str = "worker") -> KeyPair:
    return KeyPair(content_digest(f"{kind} {number}".encode()))


def content(worker: KeyPair, version: int, index: int, kind: str = "content") -> bytes:
    return f"{kind} {worker.peer_id} {version} {index}".encode()


def window(
    worker: KeyPair,
    version: int = 0,
    first: int = 0,
    places: int = 16,
    claims: Sequence[Sequence[Claim]] | None = None,
    *,
    kind: str = "content",
    terms: bytes = TERMS,
) -> SignedWindow:
    """Return a signed window; without ``claims`` each place has a group with spread."""
    said = claims or [(Claim.SPREAD, Claim.ALIKE)] * places
    contents = tuple(
        content_digest(content(worker, version, index, kind))
        for index in range(first, first + places)
    )
    made = Window(
        *(RUN, terms, worker.peer_id, PolicyVersion(version), POLICY, first, contents),
        bytes(claim for row in said for claim in row),
    )
    signed = SignedWindow.sign(made, worker)
    for index in made.places:
        _MADE[made.commitment(index)] = Submission(
            signed, index, content(worker, version, index, kind)
        )
    return signed


_MADE: dict[Commitment, Submission] = {}


def submission_of(commitment: Commitment) -> Submission:
    return _MADE[commitment]


def verdict(
    validator: KeyPair,
    commitment: Commitment,
    word: Verdict = Verdict.ACCEPTED,
    reason: str = Reason.MANTISSA_MEAN.value,
    excess: float = 20.0,
) -> SignedVerdict:
    """Return a validator's verdict; a rejection exceeds its limit ``excess`` times."""
    numbers = (reason, excess, 1.0) if word is Verdict.REJECTED else ("within limits", 0.0, 0.0)
    made = SignedVerdict(validator.peer_id, commitment, word, *numbers, (1.0, 0.0), b"l" * 32)
    return made.signed(validator)


def answer(trainer: KeyPair, signed: SignedWindow, wanted: tuple[int, ...]) -> Answer:
    account = Account(
        doing=TrainerDoing.WAITS, step=1, steps=9, own=Fates(learnt=3),
        curve=[(0, -1), (9, 700)],
    )  # fmt: skip
    made = Answer(
        trainer=trainer.peer_id, window=signed.window.digest, wanted=wanted,
        scorer=trainer.peer_id, due=600, version=signed.window.version, wanted_next=16,
        is_newcomer=True, stood=0, owed=32, account=account,
    )  # fmt: skip
    return made.signed(trainer)
