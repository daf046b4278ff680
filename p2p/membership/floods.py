"""What one neighbour may make us pass on to all others.

Theory of operation
-------------------
A message to one node that all pass on costs a swarm of 200 a thousand times what it cost its sender. So
nothing is passed on for ever on the word of one neighbour, however many peers it names.

*Accusations* of members are passed on at once while the neighbour that tells them has credit, so that a zone
that loses power is known of everywhere within seconds. Each accusation that is refuted costs credit. Who has
none left is not silenced, since it may only have passed on what another made up: its accusations are
*doubted*, that is, we ask the accused ourselves and pass the accusation on when no answer came
(`silence`). So a liar's lies end at the first honest node, which pays two messages for each; and a death
under attack is known some seconds later than otherwise.

What cannot be checked that way, because we do not know the peer, has a quota: accusations of strangers, and
good-byes. A newcomer that is told to all, by digest, has another.
"""

from __future__ import annotations

from typing import Final

from p2p.identity import PeerId
from p2p.membership.rumours import Quotas, TokenBucket

REFUTED: Final = 8.0
"""Refuted accusations that a neighbour may have told us of before its next are doubted. An honest one passes
on some, too: a machine that sleeps for a minute is accused by its neighbours when it has woken up."""
REFUTED_INTERVALS: Final = 12.0
"""Intervals after which one of them is forgiven: with seven neighbours a node passes on seven lies a minute
at most, which cost it 190 bytes a second at 5 s."""
DOUBTS: Final = 16.0
"""Accused peers that we ask ourselves at once, and..."""
DOUBTS_PER_INTERVAL: Final = 2.0
"""...how many in an interval: 200 bytes a second at 5 s, with the answers."""
UNCHECKED: Final = 64.0
"""Floods that a neighbour may start without our being able to check them: half of a zone of 128, and the
other neighbours tell of the other half."""
UNCHECKED_PER_INTERVAL: Final = 1 / 4
"""And how many in an interval, later: from seven neighbours one in 3 s, 300 bytes a second."""
NEWCOMERS: Final = 256.0
"""Newcomers that a neighbour names, and that we name to all others, at once: a crowd that starts together."""
NEWCOMERS_PER_INTERVAL: Final = 1.0
"""And how many in an interval, later."""


class Floods:
    """Quotas, by neighbour, of what is passed on to all."""

    __slots__ = ("_credit", "_doubts", "_newcomers", "_unchecked")

    def __init__(self, interval: float) -> None:
        self._credit = Quotas(1 / (REFUTED_INTERVALS * interval), REFUTED)
        self._doubts = TokenBucket(DOUBTS_PER_INTERVAL / interval, DOUBTS, DOUBTS, 0.0)
        self._unchecked = Quotas(UNCHECKED_PER_INTERVAL / interval, UNCHECKED)
        self._newcomers = Quotas(NEWCOMERS_PER_INTERVAL / interval, NEWCOMERS)

    def trusts(self, source: PeerId, now: float) -> bool:
        """Whether an accusation that ``source`` tells is passed on without a doubt."""
        return self._credit.has(source, now)

    def refuted(self, source: PeerId, now: float) -> None:
        """An accusation that ``source`` told was wrong."""
        self._credit.charge(source, now)

    def may_doubt(self, now: float) -> bool:
        """Whether we may ask one more accused peer ourselves."""
        return self._doubts.take(1, now)

    def may_pass_unchecked(self, source: PeerId, now: float) -> bool:
        """Whether to pass on what ``source`` says of a peer, though we cannot know."""
        return self._unchecked.take(source, now)

    def may_announce(self, source: PeerId, now: float) -> bool:
        """Whether to name to all a newcomer whom ``source`` named to us."""
        return self._newcomers.take(source, now)
