"""Words for the entries of a ledger."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.ledger.core.chain import Entry
from p2p.naming import printable
from roles.protocol.core.statements import (
    BAN_KIND,
    EARNED_KIND,
    LEARNT_KIND,
    LIE_KIND,
    RECEIPT_KIND,
    VERDICT_KIND,
    decode_accusation_untrusted,
    decode_learnt_untrusted,
)
from roles.protocol.core.verdict import SignedVerdict, decode_verdict_untrusted
from roles.protocol.core.work import Work


@dataclass(frozen=True, slots=True)
class Wording:
    """The words for an entry, and the peer that the entry is about."""

    about: PeerId | None
    text: str


def wording_untrusted(entry: Entry, verify: Verify) -> Wording:
    """Return an entry in words. Raises `BadMessage` if the body of a known kind is invalid, or
    if a verdict in it has a wrong signature."""
    body = entry.body
    match entry.kind:
        case kind if kind in (VERDICT_KIND, EARNED_KIND):
            verdict = decode_verdict_untrusted(body, verify)
            _check_parties(entry, verdict)
            return Wording(verdict.commitment.node, _verdict(verdict))
        case kind if kind in (BAN_KIND, LIE_KIND):
            accused, proof = decode_accusation_untrusted(body)
            said = "banned for a lie" if kind == BAN_KIND else "a verdict of it is a lie"
            return Wording(accused, f"{said}; proof {proof.hex()[:12]}")
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
