"""What judges have accepted, held against what the trainer's own engine finds in it.

Theory of operation
-------------------
Where lots fall the trainer believes no judge: it scores whatever it learns from. That pass, an
appeal in vain and a confession are replays of work that judges have signed verdicts on, so each
of them says which of the judges were right. This part has both sides meet, in whatever order
they come: signed acceptances, which workers bring when they settle a window, and findings. An
acceptance of what is found to be a lie is weighed as one of a delivery is
(`roles.trainer.audit`), and convicts alike; one that is borne out counts as a look that found
nothing.

So a judge that accepts without a look is found by the first lie whose worker brings the
verdict: of any cheat that is nobody's accomplice, as it brings what it was given, and of a
canary (`roles.demo.canary`). One that accepts its accomplice's lies alone is found once any of
them comes to be learnt from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from proofs.checks import Verdict
from roles.protocol.core.lies import Acceptance, Finding, Weight
from roles.protocol.core.messages import SignedVerdict, Submission
from roles.trainer.audit import Auditor

MAX_ACCEPTED: Final = 2_048
"""Contents whose acceptances are remembered, 1 KB each with two judges: what is learnt from
comes seconds after them. Of a thousand newcomers, all of whose places are judged, a few
minutes."""
MAX_FOUND: Final = 8
"""Lies that are remembered until acceptances of them come, up to 8 MiB each: a worker appeals
against one judge a moment before it brings the verdict of the other."""


class CrossCheck:
    """Acceptances and findings, by content."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        self._accepted: BoundedDict[bytes, dict[PeerId, SignedVerdict]] = BoundedDict(
            MAX_ACCEPTED
        )
        self._found: BoundedDict[bytes, tuple[Submission, Finding]] = BoundedDict(MAX_FOUND)
        self.on_spoken: Callable[[PeerId, PeerId], object] = lambda *_: None
        """Told of each validator that has judged work of a worker."""

    async def note_verdict(self, verdict: SignedVerdict) -> None:
        """A judge has signed it, and it was its place to."""
        self.on_spoken(verdict.validator, verdict.commitment.node)
        if verdict.verdict is not Verdict.ACCEPTED:
            return
        content = verdict.commitment.content
        known = self._found.get(content)
        if known is not None:
            submission, found = known
            await self._auditor.hold_against(Acceptance(verdict, submission), found)
            return
        accepted = self._accepted.get(content) or {}
        accepted[verdict.validator] = verdict
        self._accepted.renew(content, accepted)

    async def note_found(self, submission: Submission, found: Finding | None) -> None:
        """The trainer's engine has found this in a submission; None: it is in order."""
        content = submission.commitment.content
        if found is not None and found.weight >= Weight.STRIKE:
            self._found.renew(content, (submission, found))
        for verdict in (self._accepted.pop(content, None) or {}).values():
            if verdict.commitment == submission.commitment:
                await self._auditor.hold_against(Acceptance(verdict, submission), found)
