"""Accounts of each node's accepted work, which peers may query.

Theory of operation
-------------------
For each node the accounts count the groups that were taken, learnt from, or turned down because
they came too late. Groups that wait are counted in the buffer; every other group that was taken
was dropped as too old. So no group is counted twice, also after a restart. The accounts go to
disk with every step. No decision depends on them: if the file is damaged, they start from zero.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Final

from p2p.bounded import BoundedDict
from p2p.errors import StorageError
from p2p.identity import PeerId
from p2p.world import Disk
from roles.protocol.core.account import Fates
from roles.shared.checked_json import DamagedFile, keep, recall

logger = logging.getLogger(__name__)

PATH: Final = "trainer/accounts.json"
MAX_NODES: Final = 4096
"""Most nodes with a row of their own: 400 kB on disk with every step. The node whose last work
is oldest loses its row first; its numbers stay in the total."""
LATE: Final = 1024
"""Number of late deliveries that are remembered as counted, which covers minutes. A validator
whose answer was lost delivers again, and a dishonest one may repeat a delivery at will."""
QUESTIONS: Final = 20
"""Most account requests that the trainer wants to answer per second. With more nodes each node
asks less often. One answer costs 0.1 ms."""
SHORTEST_PAUSE: Final = 5
"""Least seconds between two account requests of one node when there are few nodes."""


@dataclass(slots=True)
class Row:
    """Counts of groups of one node, or of all nodes."""

    taken: int = 0
    learnt: int = 0
    no_spread: int = 0
    late: int = 0
    """Groups turned down because their policy was too old."""
    unneeded: int = 0
    """Groups turned down because the run had taken all its steps."""

    def fates(self, waiting: int, *, is_over: bool) -> Fates:
        """Return where each group is now. A group that was taken and is in no other count was
        dropped."""
        dropped = max(0, self.taken - self.learnt - self.no_spread - waiting)
        return Fates(
            learnt=self.learnt,
            no_spread=self.no_spread,
            stale=self.late + dropped,
            left_over=self.unneeded + (waiting if is_over else 0),
            waiting=0 if is_over else waiting,
        )


class Accounts:
    """A row for each node, and their total."""

    def __init__(self) -> None:
        self._rows: BoundedDict[PeerId, Row] = BoundedDict(MAX_NODES)
        self._late: BoundedDict[bytes, None] = BoundedDict(LATE)
        """Digests of the late deliveries that were counted most recently."""
        self.total = Row()
        self.submissions = 0
        """Places taken and counted: the number of receipts in the ledger when these accounts
        were saved."""

    @property
    def pause(self) -> int:
        """Seconds between two account requests of one node."""
        return max(SHORTEST_PAUSE, len(self._rows) // QUESTIONS)

    def of(self, node: PeerId) -> Row:
        """Return the row of a node, empty if it has none."""
        return self._rows.get(node) or Row()

    def take(self, node: PeerId, groups: int, no_spread: int) -> None:
        """Count ``groups`` of a node as taken; ``no_spread`` of them teach nothing."""
        self.submissions += 1
        for row in self._both(node):
            row.taken += groups
            row.no_spread += no_spread

    def learn(self, learnt: Mapping[PeerId, int]) -> None:
        """Count the groups of each node that a step has learnt from."""
        for node, groups in learnt.items():
            for row in self._both(node):
                row.learnt += groups

    def turn_down(self, node: PeerId, content: bytes, groups: int, *, is_over: bool) -> None:
        """Count accepted work that came too late for any step. The same content is counted
        once."""
        if content in self._late:
            return
        self._late[content] = None
        for row in self._both(node):
            if is_over:
                row.unneeded += groups
            else:
                row.late += groups

    def note_unsent(self, node: PeerId, groups: int) -> None:
        """Count groups that stay with their worker because its claims say that they teach
        nothing."""
        for row in self._both(node):
            row.taken += groups
            row.no_spread += groups

    def _both(self, node: PeerId) -> tuple[Row, Row]:
        row = self.of(node)
        self._rows.renew(node, row)
        return row, self.total

    async def keep(self, disk: Disk) -> None:
        """Write the accounts to disk; a disk error is not fatal."""
        rows = {str(node): astuple(row) for node, row in self._rows.items()}
        state = {"submissions": self.submissions, "total": astuple(self.total), "rows": rows}
        try:
            await keep(disk, PATH, state)
        except StorageError as error:
            logger.info("accounts_not_kept: %s", error)

    async def recall(self, disk: Disk) -> None:
        """Read the accounts that an earlier process saved."""
        try:
            found = await recall(disk, PATH)
        except DamagedFile as error:
            logger.warning("%s; the books begin anew, no learning is touched", error)
            return
        if found is None:
            return
        self.submissions = found["submissions"]
        self.total = Row(*found["total"])
        for node, row in found["rows"].items():
            self._rows[PeerId.from_base58(node)] = Row(*row)
