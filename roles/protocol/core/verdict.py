"""The signed verdict on one place: its scorer's word, and the worker's receipt.

A verdict names the `Commitment` that it is about, so it says nothing of equal content of
another worker, of other terms, or of another version. Wire tables: docs/protocols/work.md.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass, replace
from typing import Final

from p2p.errors import BadMessage
from p2p.identity import (
    SIGNATURE_BYTES,
    PeerId,
    ProtocolId,
    Signer,
    Verify,
    decode_peer_id_untrusted,
)
from p2p.wire import fields_untrusted, pack, unpack_untrusted
from proofs.checks import Verdict
from roles.contract.core.sizes import MAX_VERDICT
from roles.protocol.core.window import DIGEST_BYTES, Commitment, decode_commitment_untrusted
from roles.protocol.core.work import Work, decode_work_untrusted

VERDICT_DOMAIN: Final = ProtocolId("/shoal/work/verdict/1.0.0")
"""Domain of a scorer's signature of a verdict; no peer speaks it as a protocol."""
MAX_REASON: Final = 200
"""Most characters of a reason: a sentence that an operator reads on one line."""


@dataclass(frozen=True, slots=True)
class SignedVerdict:
    """The signed statement of a scorer, a validator or the trainer, about one place."""

    validator: PeerId
    commitment: Commitment
    verdict: Verdict
    reason: str
    statistic: float
    limit: float
    rewards: tuple[float, ...]
    """Recomputed rewards, one for each completion in order; empty unless accepted."""
    logprobs: bytes = b""
    """BLAKE3 of the scorer's log-probs; empty unless it computed them."""
    work: Work | None = None
    """Work of the place by the scorer's count; None unless accepted."""
    signature: bytes = b""

    def body(self) -> bytes:
        """Return the bytes that are signed."""
        return pack(
            [
                self.validator.digest,
                self.commitment.to_bytes(),
                self.verdict.value,
                self.reason,
                self.statistic,
                self.limit,
                struct.pack(f"<{len(self.rewards)}f", *self.rewards),
                self.logprobs,
                None if self.work is None else list(astuple(self.work)),
            ]
        )

    def signed(self, signer: Signer) -> SignedVerdict:
        """Return the verdict with its scorer's signature."""
        return replace(self, signature=signer.sign(VERDICT_DOMAIN, self.body()))

    def to_bytes(self) -> bytes:
        """Return the wire and ledger form."""
        return pack([self.body(), self.signature])

    def has_valid_signature(self, verify: Verify) -> bool:
        """Return True if the scorer that the verdict names has signed it."""
        return verify(self.validator, VERDICT_DOMAIN, self.body(), self.signature)


def decode_verdict_untrusted(data: bytes, verify: Verify | None) -> SignedVerdict:
    """Decode a verdict.

    Args:
        data: The bytes of a peer.
        verify: Checks the signature; None leaves that to the caller, who first asks what costs
            less (`SignedVerdict.has_valid_signature`).

    Raises:
        BadMessage: The bytes are no verdict, or its signature is not its scorer's.
    """
    if len(data) > MAX_VERDICT:
        raise BadMessage(f"a verdict of {len(data)} bytes is over the limit of {MAX_VERDICT}")
    body, signature = fields_untrusted(unpack_untrusted(data), bytes, bytes, what="verdict")
    validator, commitment, word, reason, statistic, limit, rewards, logprobs, work = (
        fields_untrusted(
            unpack_untrusted(body),
            *(bytes, bytes, str, str, float, float, bytes, bytes, (list, type(None))),
            what="verdict body",
        )
    )
    if len(reason) > MAX_REASON or len(rewards) % 4 or len(logprobs) not in (0, DIGEST_BYTES):
        raise BadMessage("a verdict's reason, rewards or log-probs are malformed")
    try:
        kind = Verdict(word)
    except ValueError:
        raise BadMessage(f"{word[:20]!r} is no verdict") from None
    verdict = SignedVerdict(
        decode_peer_id_untrusted(validator),
        decode_commitment_untrusted(commitment),
        kind,
        reason,
        statistic,
        limit,
        struct.unpack(f"<{len(rewards) // 4}f", rewards),
        logprobs,
        None if work is None else decode_work_untrusted(work),
        signature,
    )
    if len(signature) != SIGNATURE_BYTES:
        raise BadMessage(f"a signature is {SIGNATURE_BYTES} bytes, not {len(signature)}")
    if verify is not None and not verdict.has_valid_signature(verify):
        raise BadMessage("a verdict's signature is not its scorer's")
    return verdict
