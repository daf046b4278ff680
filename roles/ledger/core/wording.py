"""An entry of a ledger in words."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.ledger.core.chain import Entry
from roles.protocol.core.lies import decode_lie_untrusted
from roles.protocol.core.messages import SignedVerdict, decode_verdict_untrusted
from roles.protocol.core.statements import (
    EARNED_KIND,
    LEARNT_KIND,
    LIE_KIND,
    RECEIPT_KIND,
    VERDICT_KIND,
    decode_learnt_untrusted,
)
from roles.protocol.core.work import Work
from roles.shared.reasons import printable


@dataclass(frozen=True, slots=True)
class Wording:
    """What an entry says, and of whom."""

    about: PeerId | None
    text: str


def wording_untrusted(entry: Entry, verify: Verify) -> Wording:
    """Raise `BadMessage` if a kind that we know has a body that is none of its kind: also if a
    verdict in it bears a wrong signature."""
    body = entry.body
    match entry.kind:
        case kind if kind in (VERDICT_KIND, EARNED_KIND):
            verdict = decode_verdict_untrusted(body, verify)
            _check_parties(entry, verdict)
            return Wording(verdict.commitment.node, _verdict(verdict))
        case kind if kind == LIE_KIND:
            lie = decode_lie_untrusted(body, verify)
            return Wording(lie.verdict.validator, f"lied: {lie.finding}; kept in {lie.path}")
        case kind if kind == LEARNT_KIND:
            learnt = decode_learnt_untrusted(body)
            tokens = sum(work.tokens for work in learnt.work.values())
            nodes = len(learnt.work)
            return Wording(None, f"step {learnt.step}: {tokens:,} tokens of {nodes} nodes")
        case kind if kind == RECEIPT_KIND:
            return Wording(None, f"took {body.hex()[:12]}")
    return Wording(None, f"{len(body):,} bytes")


def _check_parties(entry: Entry, verdict: SignedVerdict) -> None:
    node = verdict.commitment.node
    if entry.kind == VERDICT_KIND and verdict.validator != entry.author:
        raise BadMessage(f"a verdict of {verdict.validator} stands in the ledger of another")
    if entry.kind == EARNED_KIND and node != entry.author:
        raise BadMessage(f"work of {node} stands in the ledger of another")


def _verdict(verdict: SignedVerdict) -> str:
    place = f"v{verdict.commitment.version}/{verdict.commitment.index}"
    work = verdict.work or Work()
    counted = f", {work.tokens:,} tokens" if work.tokens else ""
    said = f"{verdict.verdict.value} {place}{counted}"
    return f"{said}: {printable(verdict.reason)}"
