"""The verdict on each submission: a worker that sends it again gets the stored one.

A submission is under way (a `Job` in the queue or at the scorer), judged (its verdict is an
entry of the ledger), or given up (`INCONCLUSIVE`, which leaves no entry and is remembered here
alone). Rejections of nodes that never had work accepted, and those that a head alone earns,
leave no entry either: their makers have nothing to lose, and a maker of names would fill the
disk. The last `PASSING` of them are remembered. Another submission for the same place is a
replay (`roles.validator.core.sequence`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import trio

from p2p.bounded import BoundedDict
from p2p.shardcast.manifest import PolicyVersion
from roles.protocol.core.messages import Commitment, SignedVerdict, Submission, content_digest
from roles.validator.limits import GIVEN_UP, KNOWN, PASSING


@dataclass(frozen=True, slots=True)
class Ruling:
    """A verdict, and what goes with it to the trainer."""

    verdict: SignedVerdict
    logprobs: bytes = b""
    """The scorer's, if it accepts (`roles.engines.base.Scored`)."""


@dataclass(slots=True, eq=False)
class Job:
    """A submission on its way through the scorer."""

    submission: Submission
    is_suspect: bool = False
    """Whether work of its node was rejected of late."""
    done: trio.Event = field(default_factory=trio.Event)
    verdict: SignedVerdict | None = None
    """None once it is ``done``: there is none yet, and the worker is to ask again."""

    def finish(self, verdict: SignedVerdict | None = None) -> None:
        """Tell all streams that wait for it."""
        self.verdict = verdict
        self.done.set()


class VerdictIndex:
    """Where the verdict on a submission is, by the whole of its commitment: no two nodes or
    places share one."""

    def __init__(self) -> None:
        self._known: dict[bytes, Job | int] = {}
        """The job under way, or the ledger entry of the verdict."""
        self._recorded: deque[tuple[PolicyVersion, bytes]] = deque()
        """What of ``_known`` has a ledger entry, oldest first."""
        self._given_up: BoundedDict[bytes, SignedVerdict] = BoundedDict(GIVEN_UP)
        """The last `INCONCLUSIVE` verdicts: places that are taken, and a worker that asks again
        must be told the same. Not that a policy is stale: it stays so, and 1,024 claims of old
        work would displace the others, whose authors would then be rejected for a replay."""

        self._passing: BoundedDict[bytes, SignedVerdict] = BoundedDict(PASSING)
        """Rejections that are in no ledger. Theirs do not displace what was given up."""

    def __len__(self) -> int:
        return len(self._known)

    def find(self, commitment: Commitment) -> Job | int | SignedVerdict | None:
        """The job, the ledger entry's number, or the verdict; None if this submission is
        new."""
        key = _key(commitment)
        return self._given_up.get(key) or self._passing.get(key) or self._known.get(key)

    def begin(self, job: Job) -> None:
        """It is in the queue from now on."""
        self._known[_key(job.submission.commitment)] = job

    def drop(self, job: Job) -> None:
        """It got no verdict that lasts: it left the queue, or was given up."""
        del self._known[_key(job.submission.commitment)]

    def record(self, commitment: Commitment, seqno: int) -> None:
        """Find the verdict in the ledger from now on."""
        key = _key(commitment)
        self._known[key] = seqno
        self._recorded.append((commitment.version, key))

    def give_up(self, verdict: SignedVerdict) -> None:
        """Remember an `INCONCLUSIVE` verdict: it is in no ledger."""
        self._given_up[_key(verdict.commitment)] = verdict

    def let_pass(self, verdict: SignedVerdict) -> None:
        """Remember a rejection that is in no ledger, for a while."""
        self._passing[_key(verdict.commitment)] = verdict

    def forget_below(self, version: PolicyVersion) -> None:
        """Forget which entries are about places under older policies, beyond `KNOWN`."""
        while len(self._recorded) > KNOWN and self._recorded[0][0] < version:
            self._known.pop(self._recorded.popleft()[1], None)


def _key(commitment: Commitment) -> bytes:
    return content_digest(commitment.to_bytes())
