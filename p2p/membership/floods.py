"""What others may make us pass on to all, and what they may make us answer.

Theory of operation
-------------------
A message to one node that all pass on costs a swarm of 200 a thousand times what it cost its sender. So
nothing is passed on for ever on the word of others, however many peers it names.

*Accusations* of members are passed on at once in quiet times, so that a zone that loses power is known of
everywhere within seconds. Each that is refuted costs some of the calm, and without calm accusations are
*doubted*: we ask the accused ourselves, and pass the accusation on when no answer came (`silence`). So the
lies of a neighbour then end at the first honest node, which pays two messages for each; and a death in such
times is known some seconds later. The neighbour is not blamed: it may have passed on what another made up.

What cannot be checked that way, because we do not know the peer, has a quota for each neighbour: accusations
of strangers, and good-byes. A newcomer that is told to all, by digest, has another.

*Answers* are larger than questions. Requests to be neighbours that are refused, and heartbeats that are asked
for, have quotas for each peer and for all that are no neighbours.
"""

from __future__ import annotations

from typing import Final

from p2p.identity import PeerId
from p2p.membership.rumours import Quotas, TokenBucket

CALM: Final = 16.0
"""Refuted accusations after which accusations are doubted. Some are honest: a machine that sleeps for a
minute is accused by its neighbours, and refutes them when it wakes up."""
CALM_INTERVALS: Final = 2.0
"""Intervals after which one of them is forgiven: so many a liar may send round for ever, 330 bytes a second
for each node at 5 s; and so many wake up in a swarm of 1,000 machines that sleep every three hours."""
DOUBTS: Final = 4.0
"""Accused peers that we ask ourselves at once because of one neighbour, and..."""
DOUBT_INTERVALS: Final = 2.0
"""...intervals until we ask one more: 46 bytes a second for each liar among the neighbours, with answers."""
OWN_DOUBTS: Final = 16.0
"""The same, at once, of those that were accused in quieter times and are about to be buried; and one more in
each `DOUBT_INTERVALS`."""
UNCHECKED: Final = 32.0
"""Floods that a neighbour may start without our being able to check them: a zone of 200, if the other
neighbours tell of the rest."""
UNCHECKED_PER_INTERVAL: Final = 1 / 4
"""And how many in an interval, later: from seven neighbours one in 3 s, 300 bytes a second."""
NEWCOMERS: Final = 256.0
"""Newcomers that a neighbour names, and that we name to all others, at once: a crowd that starts together."""
NEWCOMERS_PER_INTERVAL: Final = 1.0
"""And how many in an interval, later."""
ASKS: Final = 4.0
"""Requests to be neighbours that a peer may send at once: a newcomer asks its bootstrap after 1, 2, 4 s."""
ASK_INTERVALS: Final = 6.0
"""Intervals between two of them, later: as long as an honest peer that was refused waits (`AVOID`)."""
REFUSALS: Final = 256.0
"""Refusals at once, to all together; who gets none takes our silence for one."""
REFUSALS_PER_INTERVAL: Final = 4.0
"""And how many in an interval, later: 0.7 KB each, with the names of others."""
WALK_INTERVALS: Final = 120.0
"""Intervals between two joins of one peer after which its heartbeat walks: some 15 messages each. It gets our
answer, and names of others, meanwhile."""
NETWORK_WALKS: Final = 16.0
"""Newcomers of one public network whose heartbeats walk at once because they asked us, and..."""
NETWORK_WALK_INTERVALS: Final = 8.0
"""...intervals until one more does. 200 identities of one /24 that ask every node of 200 in turn made the
swarm send 3.6 times what it sends when quiet, more than half of it walks. 200 honest machines behind one
address are slowed down by nothing: each gets an answer, names of others, and asks those."""
NETWORK_REFUSALS: Final = 32.0
"""Refusals at once for one public network, and..."""
NETWORK_REFUSALS_PER_INTERVAL: Final = 0.5
"""...how many in an interval, later: 70 bytes a second for each network that floods us."""
WALKS_ON: Final = 512.0
"""Walks that one neighbour may send through us at once, and..."""
WALKS_ON_PER_INTERVAL: Final = 4.0
"""...in an interval, later: one newcomer a second. Each costs three messages at most."""
GIVEN: Final = 256.0
"""Heartbeats that one peer gets at once: a newcomer's whole view."""
GIVEN_PER_INTERVAL: Final = 8.0
"""And how many in an interval, later: half of what it may ask all its neighbours for (`refresh`)."""
GIVEN_TO_OTHERS: Final = 8192.0
"""Heartbeats at once that all get who are no neighbours: 350 newcomers that ask for all they were told of."""
GIVEN_TO_OTHERS_PER_INTERVAL: Final = 4.0
"""And how many in an interval, later."""


class Floods:
    """Quotas of what is passed on, and of what is answered."""

    __slots__ = (
        "_asks", "_calm", "_doubts", "_given", "_given_to_others", "_network_refusals", "_network_walks",
        "_newcomers", "_own_doubts", "_refusals", "_unchecked", "_walks", "_walks_on",
    )  # fmt: skip

    def __init__(self, interval: float) -> None:
        self._calm = TokenBucket(1 / (CALM_INTERVALS * interval), CALM, CALM, 0.0)
        self._doubts = Quotas(1 / (DOUBT_INTERVALS * interval), DOUBTS)
        self._own_doubts = TokenBucket(1 / (DOUBT_INTERVALS * interval), OWN_DOUBTS, OWN_DOUBTS, 0.0)
        self._unchecked = Quotas(UNCHECKED_PER_INTERVAL / interval, UNCHECKED)
        self._newcomers = Quotas(NEWCOMERS_PER_INTERVAL / interval, NEWCOMERS)
        self._asks = Quotas(1 / (ASK_INTERVALS * interval), ASKS)
        self._refusals = TokenBucket(REFUSALS_PER_INTERVAL / interval, REFUSALS, REFUSALS, 0.0)
        self._network_refusals = Quotas(NETWORK_REFUSALS_PER_INTERVAL / interval, NETWORK_REFUSALS)
        self._walks = Quotas(1 / (WALK_INTERVALS * interval), 1.0)
        self._network_walks = Quotas(1 / (NETWORK_WALK_INTERVALS * interval), NETWORK_WALKS)
        self._walks_on = Quotas(WALKS_ON_PER_INTERVAL / interval, WALKS_ON)
        self._given = Quotas(GIVEN_PER_INTERVAL / interval, GIVEN)
        self._given_to_others = TokenBucket(
            GIVEN_TO_OTHERS_PER_INTERVAL / interval, GIVEN_TO_OTHERS, GIVEN_TO_OTHERS, 0.0
        )

    def is_calm(self, now: float) -> bool:
        """Whether few accusations were refuted lately."""
        return self._calm.available(now) >= 1

    def refuted(self, now: float) -> None:
        """An accusation was wrong."""
        self._calm.tokens = max(self._calm.available(now) - 1, -CALM)

    def may_doubt(self, source: PeerId, now: float) -> bool:
        """Whether to ask an accused peer ourselves, because of ``source``."""
        return self._doubts.take(source, now)

    def may_ask_before_burial(self, now: float) -> bool:
        """Whether to ask an accused peer ourselves, because we are about to bury it."""
        return self._own_doubts.take(1, now)

    def may_pass_unchecked(self, source: PeerId, now: float) -> bool:
        """Whether to pass on what ``source`` says of a peer, though we cannot know."""
        return self._unchecked.take(source, now)

    def may_announce(self, source: PeerId, now: float) -> bool:
        """Whether to name to all a newcomer whom ``source`` named to us."""
        return self._newcomers.take(source, now)

    def may_be_asked(self, peer: PeerId, now: float) -> bool:
        """Whether ``peer`` may ask to be our neighbour."""
        return self._asks.take(peer, now)

    def may_refuse(self, network: bytes | None, now: float) -> bool:
        """Whether to answer a request, of a peer in ``network``, that we refuse."""
        if network is not None and not self._network_refusals.take(network, now):
            return False
        return self._refusals.take(1, now)

    def may_walk(self, peer: PeerId, network: bytes | None, now: float) -> bool:
        """Whether to send the heartbeat of a newcomer, which is in ``network``, on its walks."""
        return self._walks.take(peer, now) and (network is None or self._network_walks.take(network, now))

    def may_walk_on(self, source: PeerId, now: float) -> bool:
        """Whether to pass on a walk that comes from ``source``."""
        return self._walks_on.take(source, now)

    def may_give(self, peer: PeerId, count: int, now: float, *, is_neighbour: bool) -> bool:
        """Whether to hand ``peer`` so many heartbeats that it asks for."""
        return self._given.take(peer, now, count) and (is_neighbour or self._given_to_others.take(count, now))
