"""A receipt of a worker's own work, which a stranger checks without a network.

Theory of operation
-------------------
A verdict is signed by the validator and names run, worker and content, so it is worth as much
in a stranger's hands as in the worker's. A receipt is the verdicts that accepted a worker's
work, behind a head: the run file, which its owner has signed and which names the validators,
and the worker's signature over all of it, so that nobody else shows it as their own. Who reads
it trusts the run's owner to have named honest validators, and nobody else.

On disk it is a row of frames: the head ``[format, run file, worker, wall, count, digest of the
verdicts, signature]``, then the verdicts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import PeerId, Signer, Verify, decode_peer_id_untrusted
from p2p.wire import MIB, FrameParser, fields_untrusted, frame, pack, unpack_untrusted
from proofs.checks import Verdict
from roles.contract.core.file import MAX_RUN, Run, decode_run_untrusted
from roles.protocol.core.verdict import SignedVerdict, decode_verdict_untrusted
from roles.protocol.core.work import Work

DOMAIN: Final = "/shoal/work-receipt/1.0.0"
FORMAT: Final = 1
"""Version of the format, raised when receipts change, so that older readers can say so."""
MAX_RECEIPT: Final = 256 * MIB
"""Most bytes of a receipt: some 350,000 verdicts of 700 bytes each. A worker with more verdicts
makes several receipts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkReceipt:
    """The content of a receipt that was checked."""

    run: Run
    worker: PeerId
    wall: int
    """Time at which it was made, by the worker's clock."""
    accepted: dict[PeerId, Work] = field(default_factory=dict)
    """Maps each signer, a validator or the trainer, to the work that it accepted."""
    submissions: dict[PeerId, int] = field(default_factory=dict)
    """Maps each signer to the number of submissions that it accepted."""
    unnamed: int = 0
    """Submissions whose signers are no officers of the run by this edition; an earlier edition
    may have named them. They do not count."""

    @property
    def total(self) -> Work:
        """Sum of all work that counts."""
        return sum(self.accepted.values(), Work())


def sign_receipt(
    run: Run, verdicts: Sequence[SignedVerdict], worker: Signer, wall: float
) -> bytes:
    """Return a signed receipt. ``verdicts`` are the worker's own, each submission once."""
    bodies = [verdict.to_bytes() for verdict in verdicts]
    signed = _signed(run, worker.peer_id, int(wall), bodies)
    head = pack([FORMAT, run.document, *signed, worker.sign(DOMAIN, pack(signed))])
    return b"".join(map(frame, [head, *bodies]))


def _signed(run: Run, worker: PeerId, wall: int, bodies: Sequence[bytes]) -> list[bytes | int]:
    digest = hashlib.sha256(run.id + b"".join(map(frame, bodies))).digest()
    return [worker.digest, wall, len(bodies), digest]


def decode_receipt_untrusted(
    data: bytes, verify: Verify, run: Run | None = None
) -> WorkReceipt:
    """Decode and check a receipt. Raises `BadMessage`, with the reason, unless every part is
    sound.

    ``run`` is the run that the receipt must be about, if the reader knows it. Otherwise the
    receipt's own run is taken, and the reader has to judge its owner.
    """
    if len(data) > MAX_RECEIPT:
        raise BadMessage(f"a receipt has at most {MAX_RECEIPT} bytes")
    frames = _frames_untrusted(data)
    head = next(frames, b"")
    form, document, digest, wall, count, bound, signature = fields_untrusted(
        unpack_untrusted(head), int, bytes, bytes, int, int, bytes, bytes, what="receipt"
    )
    if form != FORMAT:
        raise BadMessage(f"the receipt has format {form}; this version reads {FORMAT}")
    named, worker = decode_run_untrusted(document, verify), decode_peer_id_untrusted(digest)
    if run is not None and run.id != named.id:
        raise BadMessage(
            f"the receipt is for run {named.name!r} of {named.owner}, not for {run.name!r} of"
            f" {run.owner}"
        )
    bodies = list(frames)
    signed = _signed(named, worker, wall, bodies)
    if len(bodies) != count or bound != signed[-1]:
        raise BadMessage("verdicts were taken out of the receipt, put in, or altered")
    if not verify(worker, DOMAIN, pack(signed), signature):
        raise BadMessage("the receipt's signature is not its worker's")
    receipt = WorkReceipt(run=run or named, worker=worker, wall=wall)
    return _counted_untrusted(receipt, bodies, verify)


def _frames_untrusted(data: bytes) -> Iterator[bytes]:
    parser = FrameParser(MAX_RUN + MIB)
    parser.feed(data)
    while (found := parser.next_frame()) is not None:
        yield found
    if parser.pending:
        raise BadMessage("the receipt is cut off")


def _counted_untrusted(
    receipt: WorkReceipt, bodies: Sequence[bytes], verify: Verify
) -> WorkReceipt:
    """Add up the verdicts that count. Raises `BadMessage` if a verdict does not belong in the
    receipt."""
    seen: dict[object, None] = {}
    unnamed = 0
    for number, body in enumerate(bodies):
        try:
            verdict = decode_verdict_untrusted(body, verify)
            _check_untrusted(verdict, receipt)
        except BadMessage as error:
            raise BadMessage(f"verdict {number} of the receipt: {error}") from None
        commitment, who = verdict.commitment, verdict.validator
        for key in (commitment.content, (commitment.version, commitment.index)):
            if key in seen:
                raise BadMessage(f"verdict {number} of the receipt counts work a second time")
            seen[key] = None
        if who not in receipt.run.officers:
            unnamed += 1
            continue
        receipt.submissions[who] = receipt.submissions.get(who, 0) + 1
        receipt.accepted[who] = receipt.accepted.get(who, Work()) + (verdict.work or Work())
    return WorkReceipt(
        run=receipt.run, worker=receipt.worker, wall=receipt.wall, accepted=receipt.accepted,
        submissions=receipt.submissions, unnamed=unnamed,
    )  # fmt: skip


def _check_untrusted(verdict: SignedVerdict, receipt: WorkReceipt) -> None:
    if verdict.commitment.run != receipt.run.id:
        raise BadMessage(f"it is of another run, {verdict.commitment.run.hex()[:12]}")
    if verdict.commitment.node != receipt.worker:
        raise BadMessage(f"it is about work of another node, {verdict.commitment.node}")
    if verdict.verdict is not Verdict.ACCEPTED:
        raise BadMessage(f"it does not accept the work: {verdict.verdict.value}")
