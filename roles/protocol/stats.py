"""What became of submissions: counts for people.

Those by node (`Records`) are rebuilt from the ledger at a restart; those of refusals, of work
given up, and of nodes that never had work accepted begin anew, as none leaves an entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from proofs.checks import Verdict
from roles.protocol.core.verdict import SignedVerdict
from roles.shared.reasons import tally

MAX_NODES: Final = 10_000
"""Nodes with a record of their own, as many peers as a host remembers: identities are cheap to
mint. The one judged longest ago goes first; its verdicts stay in the ledger and in the
totals."""
MAX_STRANGERS: Final = 64
"""Nodes without accepted work with a record of their own, apart from the others, which they do
not displace: an operator looks at the latest, and each is 300 bytes of every status."""
MAX_WORKERS: Final = 64
"""Nodes whose connections are kept for their work: more than one scorer can serve, and a
sixteenth of all connections."""


@dataclass(slots=True)
class NodeRecord:
    """The submissions of one node, by verdict."""

    accepted: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


class Records:
    """All nodes' records, and their totals."""

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self._workers: BoundedDict[PeerId, None] = BoundedDict(MAX_WORKERS)
        self._nodes: BoundedDict[PeerId, NodeRecord] = BoundedDict(max_nodes)
        self._strangers: BoundedDict[PeerId, NodeRecord] = BoundedDict(MAX_STRANGERS)
        self.accepted = 0
        self.rejected = 0
        self.reasons: dict[str, int] = {}
        """Rejections by reason, of all nodes."""

    def __len__(self) -> int:
        return len(self._nodes) + len(self._strangers)

    def count(self, verdict: SignedVerdict) -> None:
        """Add an acceptance or a rejection; nothing else leaves a mark."""
        node = verdict.commitment.node
        record = self.of(node)
        self._workers.pop(node, None)
        if verdict.verdict is Verdict.ACCEPTED:
            self.accepted += 1
            record.accepted += 1
            self._workers[node] = None
        elif verdict.verdict is Verdict.REJECTED:
            self.rejected += 1
            record.rejected += 1
            tally(record.reasons, verdict.reason)
            tally(self.reasons, verdict.reason)
        if record.accepted:
            self._strangers.pop(node, None)
            self._nodes.renew(node, record)
        else:
            self._strangers.renew(node, record)

    @property
    def workers(self) -> tuple[PeerId, ...]:
        """The nodes whose last work was accepted, the latest of them last."""
        return tuple(self._workers)

    def of(self, node: PeerId) -> NodeRecord:
        """One node's record, empty if it has none."""
        return self._nodes.get(node) or self._strangers.get(node) or NodeRecord()

    def health(self) -> dict[str, dict[str, object]]:
        """As plain values, by node."""
        return {
            str(peer): {
                "accepted": record.accepted,
                "rejected": record.rejected,
                "reasons": dict(record.reasons),
            }
            for peer, record in (*self._nodes.items(), *self._strangers.items())
        }


class ScoringStats:
    """All that a scorer counts, a validator's or the trainer's."""

    def __init__(self) -> None:
        self.records = Records()
        self.inconclusive: dict[str, int] = {}
        """Submissions given up, by reason."""
        self.refused: dict[str, int] = {}
        """Submissions refused, by the kind of refusal."""

    def refuse(self, kind: str) -> None:
        """A worker was told to ask again, or that it may not ask."""
        tally(self.refused, kind)

    def give_up(self, reason: str) -> None:
        """A submission got a verdict that blames no worker."""
        tally(self.inconclusive, reason)

    def health(self) -> dict[str, object]:
        """As plain values."""
        return {
            "accepted": self.records.accepted,
            "rejected": self.records.rejected,
            "reasons": dict(self.records.reasons),
            "inconclusive": dict(self.inconclusive),
            "refused": dict(self.refused),
            "nodes": self.records.health(),
        }
