"""What became of each node's accepted work: the trainer's books, and who may look.

Theory of operation
-------------------
The books say of each node how many groups were taken, learnt from, or turned down because
they came too late. What waits is in the buffer; whatever was taken and is nowhere else was
dropped as too old. So nothing is counted in two places, and a restart counts nothing twice.
They go to disk with every step, and decide nothing: damaged ones begin anew.
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
"""Nodes with a row: 400 kB on disk with every step. The one whose work came longest ago goes
first, and stays in the total."""
LATE: Final = 1024
"""Deliveries that came too late and are remembered as counted: minutes of them. A validator
whose answer was lost brings one again, and one that lies as often as it likes."""
QUESTIONS: Final = 20
"""Answers a second that the trainer means to give, at most: with more nodes each asks more
rarely. One costs 0.1 ms."""
SHORTEST_PAUSE: Final = 5
"""Seconds between two questions of a node, of which the trainer may have few."""


@dataclass(slots=True)
class Row:
    """Groups of one node, or of all."""

    taken: int = 0
    learnt: int = 0
    no_spread: int = 0
    late: int = 0
    """Turned down: too old already."""
    unneeded: int = 0
    """Turned down: the run had all its steps."""

    def fates(self, waiting: int, *, is_over: bool) -> Fates:
        """Each in one place; what was taken and is nowhere else was dropped."""
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
        """What those counted last were of."""
        self.total = Row()
        self.submissions = 0
        """Taken and counted: as many receipts as the ledger had when these books were kept."""

    @property
    def pause(self) -> int:
        """Seconds between two questions of one node."""
        return max(SHORTEST_PAUSE, len(self._rows) // QUESTIONS)

    def of(self, node: PeerId) -> Row:
        """A node's row, empty if it has none."""
        return self._rows.get(node) or Row()

    def take(self, node: PeerId, groups: int, no_spread: int) -> None:
        """So many ``groups`` were taken, of which some teach nothing."""
        self.submissions += 1
        for row in self._both(node):
            row.taken += groups
            row.no_spread += no_spread

    def learn(self, learnt: Mapping[PeerId, int]) -> None:
        """A step has learnt from so many groups of each node."""
        for node, groups in learnt.items():
            for row in self._both(node):
                row.learnt += groups

    def turn_down(self, node: PeerId, content: bytes, groups: int, *, is_over: bool) -> None:
        """Accepted work that came too late for any step; counted once, however often."""
        if content in self._late:
            return
        self._late[content] = None
        for row in self._both(node):
            if is_over:
                row.unneeded += groups
            else:
                row.late += groups

    def note_unsent(self, node: PeerId, groups: int) -> None:
        """So many groups stay with their worker: by its claims they teach nothing."""
        for row in self._both(node):
            row.taken += groups
            row.no_spread += groups

    def _both(self, node: PeerId) -> tuple[Row, Row]:
        row = self.of(node)
        self._rows.renew(node, row)
        return row, self.total

    async def keep(self, disk: Disk) -> None:
        """Put them on disk, if the disk takes them."""
        rows = {str(node): astuple(row) for node, row in self._rows.items()}
        state = {"submissions": self.submissions, "total": astuple(self.total), "rows": rows}
        try:
            await keep(disk, PATH, state)
        except StorageError as error:
            logger.info("accounts_not_kept: %s", error)

    async def recall(self, disk: Disk) -> None:
        """Read what an earlier life kept."""
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
