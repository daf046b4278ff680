"""Verdicts that accepted this node's work, kept in its ledger: what receipts are made of."""

from __future__ import annotations

from p2p.node.node import Node
from roles.protocol.core.statements import EARNED_KIND
from roles.protocol.core.verdict import SignedVerdict


async def keep_earned(node: Node, verdict: SignedVerdict) -> None:
    """Keep a verdict that accepts, durably. What a kill brings twice counts once in a receipt.

    Raises:
        StorageError: The disk refuses it.
    """
    ledger = await node.ledger.opened()
    await ledger.append(EARNED_KIND, verdict.to_bytes())
