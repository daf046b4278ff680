"""Verdicts that accepted this node's work, kept in its ledger: what receipts are made of."""

from __future__ import annotations

from collections.abc import Sequence

from p2p.node.node import Node
from proofs.checks import Verdict
from roles.protocol.core.messages import SignedVerdict
from roles.protocol.core.statements import EARNED_KIND


async def keep_earned(node: Node, verdicts: Sequence[SignedVerdict]) -> None:
    """Keep the first that accepts, durably. Raises `StorageError`; what a kill brings a second
    time counts once in a receipt."""
    accepted = (one for one in verdicts if one.verdict is Verdict.ACCEPTED)
    first = next(accepted, None)
    if first is not None:
        ledger = await node.ledger.opened()
        await ledger.append(EARNED_KIND, first.to_bytes())
