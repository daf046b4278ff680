"""Permission of a role to work now, by the newest edition of the run file.

Theory of operation
-------------------
A role is opened under one edition and meets others. A later one may take its node's name away,
change what engines and submissions are made of, or not come in time, so that the last has
expired. In each case the role rests: it begins no work, signs nothing, publishes nothing, and
tells its peers to ask again; the node goes on relaying. `RoleStanding.wait` is in front of
every piece of work and `RoleStanding.check` in front of every signature, because an edition may
come while an engine works. The role goes on as soon as an edition allows it.

The node's owner may pause it, or give it hours (`p2p.node.share`). Then the role rests in the
same way, but what it has begun it finishes, signs and delivers: a machine that is wanted for
something else loses no work.

What an edition may change under a role that works (officers, admission, limits) is read from
`RoleStanding.run` each time, never kept.
"""

from __future__ import annotations

import logging

from p2p.errors import ConfigError, ShoalError
from p2p.node.admission import Capability
from p2p.node.node import Node
from roles.contract import Run, run_of

logger = logging.getLogger(__name__)


class AtRest(ShoalError):
    """Raised if the role may not work now; the message says why."""


class RoleStanding:
    """Permission of one role of one node under the run file."""

    def __init__(self, node: Node, began: Run, job: str, name: str = "") -> None:
        """Make the standing of a role.

        ``began`` is the edition that the role's engine is made of, which may not be the newest,
        since an edition may come while the engine is opened. ``job``: what `Run.check_job`
        calls the work; ``name`` is the role's own, if it is another.
        """
        self._node = node
        self._job = job
        self._name = name or job
        self._began = began
        self._judged: tuple[int, str] = (0, "")
        """An epoch and its objection to this role, computed once for each epoch."""

    @property
    def run(self) -> Run:
        """Newest edition of the run."""
        return run_of(self._node)

    @property
    def why_not(self) -> str:
        """Reason why the role may begin no work, in a sentence with the remedy; empty if it
        may."""
        return self.objection or self._node.rest.why_not

    @property
    def is_paused(self) -> bool:
        """True if only this machine's owner stops the role from beginning work. It finishes
        what it has begun."""
        return bool(self._node.rest.why_not) and not self.objection

    @property
    def objection(self) -> str:
        """Reason why the run does not let the role work, even to finish what it has begun;
        empty if it does."""
        run = self.run
        if self._judged[0] != run.epoch:
            self._judged = (run.epoch, self._objection(run))
        if self._judged[1]:
            return self._judged[1]
        if not self._node.book.in_force:
            name = run.name
            return f"the run file of {name!r} has expired; ask its owner for a newer edition"
        return self._why_not_admitted(run) if self._job == "inference" else ""

    def _objection(self, run: Run) -> str:
        changed = self._began.why_restart(run)
        if changed:
            return (
                f"epoch {run.epoch} of run {run.name!r} changes its {changed}: start the node"
                " again"
            )
        try:
            run.check_job(self._node.peer_id, self._job)
        except ConfigError as error:
            return str(error)
        return ""

    def _why_not_admitted(self, run: Run) -> str:
        """Return the reason why a worker is not admitted: it lacks an entry on the list, an
        invite, or the run's work stamp."""
        own, book = self._node.peer_id, self._node.book
        why_not = book.why_not(own, Capability.GENERATE)
        if why_not:
            return f"epoch {run.epoch} of run {run.name!r} does not admit it: {why_not}"
        if self._node.lacks_work(own):
            return f"it makes {run.work_stamp}"
        return ""

    def check(self) -> None:
        """Raise `AtRest` if the role may not finish its work."""
        if self.objection:
            raise AtRest(self.objection)

    async def wait(self) -> None:
        """Wait until the role may work."""
        while self.why_not:
            await self._node.book.wait_change()

    async def wait_run(self) -> None:
        """Wait until the run lets the role finish what it has begun, paused or not."""
        while self.objection:
            await self._node.book.wait_change()

    async def watch(self) -> None:
        """Tell the operator and the swarm, in one sentence and one heartbeat, whenever the role
        rests or goes on. Works until cancelled."""
        said = ""
        while True:
            why_not = self.why_not
            if why_not != said:
                self._tell(why_not)
                said = why_not
            await self._node.book.wait_change()

    def _tell(self, why_not: str) -> None:
        me, job = self._node.membership.me, self._name
        others = tuple(role for role in me.profile.roles if role != job)
        if why_not:
            logger.warning("the %s rests, the node goes on relaying: %s", job, why_not)
        else:
            logger.warning("the %s goes on, in epoch %d of its run", job, self.run.epoch)
        me.update(roles=others if why_not else (*others, job))
        self._node.world.trace("role.rests" if why_not else "role.goes_on", role=job)
