"""Counts of submissions by result, for people.

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
"""Most nodes with a record of their own, as many peers as a host remembers, since identities
cost nothing. The node that was judged longest ago is removed first; its verdicts stay in the
ledger and in the totals."""
MAX_STRANGERS: Final = 64
"""Most nodes without accepted work that have a record of their own. They do not displace other
nodes. An operator looks at the latest, and each takes 300 bytes of every status."""
MAX_WORKERS: Final = 64
"""Most nodes whose connections are protected because of their work: more than one scorer can
serve, and a sixteenth of all connections."""


@dataclass(slots=True)
class NodeRecord:
    """Counts of the submissions of one node by verdict."""

    accepted: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


class Records:
    """Records of all nodes, and their totals."""

    def __init__(self, max_nodes: int = MAX_NODES) -> None:
        self._workers: BoundedDict[PeerId, None] = BoundedDict(MAX_WORKERS)
        self._nodes: BoundedDict[PeerId, NodeRecord] = BoundedDict(max_nodes)
        self._strangers: BoundedDict[PeerId, NodeRecord] = BoundedDict(MAX_STRANGERS)
        self.accepted = 0
        self.rejected = 0
        self.reasons: dict[str, int] = {}
        """Rejections of all nodes by reason."""

    def __len__(self) -> int:
        return len(self._nodes) + len(self._strangers)

    def count(self, verdict: SignedVerdict) -> None:
        """Count an acceptance or a rejection; other verdicts are ignored."""
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
        """Nodes whose last work was accepted, in the order of that work."""
        return tuple(self._workers)

    def of(self, node: PeerId) -> NodeRecord:
        """Return the record of a node, empty if it has none."""
        return self._nodes.get(node) or self._strangers.get(node) or NodeRecord()

    def health(self) -> dict[str, dict[str, object]]:
        """Return the records as plain values, by node."""
        return {
            str(peer): {
                "accepted": record.accepted,
                "rejected": record.rejected,
                "reasons": dict(record.reasons),
            }
            for peer, record in (*self._nodes.items(), *self._strangers.items())
        }


class ScoringStats:
    """All counts of a scorer, a validator's or the trainer's."""

    def __init__(self) -> None:
        self.records = Records()
        self.inconclusive: dict[str, int] = {}
        """Submissions given up, by reason."""
        self.refused: dict[str, int] = {}
        """Submissions refused, by the kind of refusal."""

    def refuse(self, kind: str) -> None:
        """Count a request that was refused or postponed."""
        tally(self.refused, kind)

    def give_up(self, reason: str) -> None:
        """Count a submission that got a verdict that blames no worker."""
        tally(self.inconclusive, reason)

    def health(self) -> dict[str, object]:
        """Return the counts as plain values."""
        return {
            "accepted": self.records.accepted,
            "rejected": self.records.rejected,
            "reasons": dict(self.records.reasons),
            "inconclusive": dict(self.inconclusive),
            "refused": dict(self.refused),
            "nodes": self.records.health(),
        }
