"""Contribution of each worker to a run, by the ledgers of its validators and its trainer.

A place counts once, whichever ledgers have its verdict: by the digest of its commitment. A
validator counts what it accepted, the trainer what it has learnt from; neither says what a
worker is owed, which is not for software to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, Verify
from p2p.ledger.core.chain import Entry
from proofs.checks import Verdict
from roles.contract import Run
from roles.protocol.core.statements import (
    LEARNT_KIND,
    VERDICT_KIND,
    Learnt,
    decode_learnt_untrusted,
)
from roles.protocol.core.verdict import SignedVerdict, decode_verdict_untrusted
from roles.protocol.core.work import Work

COLUMNS: Final = (
    "worker",
    "accepted_submissions",
    "rejected_submissions",
    "accepted_prompt_tokens",
    "accepted_tokens",
    "accepted_prompt_flops",
    "accepted_flops",
    "learnt_tokens",
    "learnt_flops",
)
"""Columns of the exported table, which has a row per worker. FLOPs are those of the drawn
tokens; those of the prompts have a column of their own."""


@dataclass(slots=True)
class Contribution:
    """The contribution of one worker."""

    accepted: Work = field(default_factory=Work)
    learnt: Work = field(default_factory=Work)
    submissions: int = 0
    rejected: int = 0

    def row(self, worker: PeerId, run: Run) -> dict[str, str | int]:
        """Return the columns of the worker's row, by name."""
        shape = run.terms.model.shape
        prompt_flops, flops = self.accepted.flops(shape)
        cells = (
            *(str(worker), self.submissions, self.rejected),
            *(self.accepted.prompt, self.accepted.tokens, prompt_flops, flops),
            *(self.learnt.tokens, self.learnt.flops(shape)[1]),
        )
        return dict(zip(COLUMNS, cells, strict=True))


def contributions(
    entries: Iterable[Entry], run: Run, verify: Verify
) -> dict[PeerId, Contribution]:
    """Return the contributions to ``run`` by worker, those with the most accepted tokens first.

    Only statements in ledgers of the run's officers count.
    """
    found: dict[PeerId, Contribution] = {}
    verdicts: dict[bytes, SignedVerdict] = {}
    steps: dict[tuple[PeerId, int, int], Learnt] = {}
    for entry in entries:
        if entry.kind == VERDICT_KIND and entry.author in run.terms.validators:
            verdict = _verdict_untrusted(entry, verify)
            if verdict is not None and verdict.commitment.run == run.id:
                verdicts.setdefault(verdict.commitment.digest, verdict)
        elif entry.kind == LEARNT_KIND and entry.author in run.terms.trainers:
            for learnt in _learnt_untrusted(entry):
                steps[entry.author, learnt.step, learnt.part] = learnt
    for verdict in verdicts.values():
        one = found.setdefault(verdict.commitment.node, Contribution())
        one.submissions += verdict.verdict is Verdict.ACCEPTED
        one.rejected += verdict.verdict is Verdict.REJECTED
        one.accepted += verdict.work or Work()
    for learnt in steps.values():
        for node, work in learnt.work.items():
            one = found.setdefault(node, Contribution())
            one.learnt += work
    order = sorted(found, key=lambda node: (-found[node].accepted.tokens, node))
    return {node: found[node] for node in order}


def _verdict_untrusted(entry: Entry, verify: Verify) -> SignedVerdict | None:
    try:
        verdict = decode_verdict_untrusted(entry.body, verify)
    except BadMessage:
        return None
    return verdict if verdict.validator == entry.author else None


def _learnt_untrusted(entry: Entry) -> Iterator[Learnt]:
    try:
        yield decode_learnt_untrusted(entry.body)
    except BadMessage:
        return
