"""How much a peer may make us pass on to all, and how much it may make us answer.

Theory of operation
-------------------
A message that every node passes on costs a swarm of 200 a thousand times what it cost its
sender. So every flood that a node starts on the word of another is limited.

*Suspicions* of members are passed on at once while the node trusts them, so that the failure of
a whole zone is known everywhere within seconds. Each suspicion that is refuted takes one token
of that trust. A node that has none left *checks* a suspicion first: it asks the suspected peer
itself, and passes the suspicion on only if no answer came (`failure_detector`). The lies of a
neighbour then end at the first honest node, which pays two messages for each; a death in such
times is known some seconds later. The neighbour gets no penalty: it may have passed on what
another node made up. A suspicion that its peer refutes because it was started again (`RESTART`)
was true, and takes nothing, unless that peer is started again all the time.

What cannot be checked that way, because the node does not know the peer, has a quota for each
neighbour: suspicions of unknown peers, and good-byes. Newcomers that are announced to all, by
digest, have another.

*Answers* are larger than questions. Requests to be neighbours that are refused, and heartbeats
that are asked for, have quotas for each peer and for all peers together that are no neighbours.
"""

from __future__ import annotations

from typing import Final

from p2p.bounded import RateLimit
from p2p.identity import PeerId
from p2p.membership.core.quotas import KeyedQuotas

TRUST: Final = 16.0
"""Refuted suspicions after which a peer's suspicions are checked before they are passed on. Not
every false one is a lie: a machine that slept for a minute is suspected, and refutes when it
wakes."""
TRUST_INTERVALS: Final = 2.0
"""Intervals after which one refuted suspicion is forgiven. It must cover the machines of a
large swarm that wake up by chance; a liar may send as many for ever."""
RESTART: Final = 1000
"""A heartbeat whose number is greater by this much says that its peer was started again: a
running node counts by one, a new life begins at its clock in milliseconds. Such a refutation
costs no trust."""
RESTART_INTERVALS: Final = 24.0
"""Intervals until one peer's next restart takes no trust: two minutes at 5 s. A peer may say of
its number what it likes, and have accomplices suspect it: so often each can make all others
pass on a suspicion and a refutation, as it could by being started again in truth."""
CHECKS: Final = 4.0
"""Checks that one neighbour may cause at once: as many suspected peers are asked."""
CHECK_INTERVALS: Final = 2.0
"""Intervals until the same neighbour may cause one more: 46 bytes a second for each liar among
the neighbours, answers included."""
FINAL_CHECKS: Final = 16.0
"""Checks at once of members that were suspected while the node still trusted suspicions, and
are about to be declared dead; and one more in each `CHECK_INTERVALS`."""
UNCHECKED: Final = 32.0
"""Floods that a neighbour may start without our being able to check them: a zone of 200, if the
other neighbours tell of the rest."""
UNCHECKED_PER_INTERVAL: Final = 1 / 4
"""And how many in an interval, later: from seven neighbours one in 3 s, 300 bytes a second."""
NEWCOMERS: Final = 256.0
"""Newcomers that a neighbour names, and that we name to all others, at once: a crowd that
starts together."""
NEWCOMERS_PER_INTERVAL: Final = 1.0
"""And how many in an interval, later: from seven neighbours 1.4 a second at 5 s, a swarm that
grows by 5,000 in an hour."""
ASKS: Final = 4.0
"""Requests to be neighbours that a peer may send at once: a newcomer asks its bootstrap after
1, 2, 4 s."""
ASK_INTERVALS: Final = 6.0
"""Intervals between two of them, later: as long as an honest peer that was refused waits
(`AVOID`)."""
REFUSALS: Final = 256.0
"""Refusals at once, to all together; who gets none takes our silence for one."""
REFUSALS_PER_INTERVAL: Final = 4.0
"""And how many in an interval, later: 0.7 KB each, with the names of others."""
WALK_INTERVALS: Final = 120.0
"""Intervals between two joins of one peer after which its heartbeat walks: some 15 messages
each. It gets our answer, and names of others, meanwhile."""
NETWORK_WALKS: Final = 16.0
"""Newcomers of one public network whose heartbeats walk at once because they asked us."""
NETWORK_WALK_INTERVALS: Final = 8.0
"""Intervals until a network may have one more walk started. Many identities behind one address
need none: each is answered, and told others to ask."""
NETWORK_REFUSALS: Final = 32.0
"""Refusals at once for one public network: an eighth of all (`REFUSALS`), so that it takes
eight networks to make us silent to the others."""
NETWORK_REFUSALS_PER_INTERVAL: Final = 0.5
"""And how many in an interval, later: 70 bytes a second for each network that floods us."""
FORWARDED_WALKS: Final = 512.0
"""Walks that one neighbour may send through us at once, twice as many as newcomers that it may
name (`NEWCOMERS`), and..."""
FORWARDED_WALKS_PER_INTERVAL: Final = 4.0
"""...in an interval, later: one newcomer a second. Each costs three messages at most."""
ANSWERED: Final = 256.0
"""Heartbeats that one peer gets at once: a newcomer's whole view, 205, with room."""
ANSWERED_PER_INTERVAL: Final = 8.0
"""And how many in an interval, later: half of what it may ask all its neighbours for
(`refresh`)."""
ANSWERED_TO_OTHERS: Final = 8192.0
"""Heartbeats at once that all get who are no neighbours: 350 newcomers that ask for all they
were told of."""
ANSWERED_TO_OTHERS_PER_INTERVAL: Final = 4.0
"""And how many in an interval, later: 200 bytes a second at 250 a heartbeat. A node that does
not live next to us has neighbours of its own to ask."""


class FloodQuotas:
    """Quotas of what is passed on, and of what is answered."""

    __slots__ = (
        "_answered",
        "_answered_to_others",
        "_asks",
        "_checks",
        "_final_checks",
        "_forwarded_walks",
        "_network_refusals",
        "_network_walks",
        "_newcomers",
        "_refusals",
        "_restarts",
        "_trust",
        "_unchecked",
        "_walks",
    )  # fmt: skip

    def __init__(self, interval: float) -> None:
        self._trust = RateLimit(1 / (TRUST_INTERVALS * interval), TRUST)
        self._restarts = KeyedQuotas(1 / (RESTART_INTERVALS * interval), 1.0)
        self._checks = KeyedQuotas(1 / (CHECK_INTERVALS * interval), CHECKS)
        self._final_checks = RateLimit(1 / (CHECK_INTERVALS * interval), FINAL_CHECKS)
        self._unchecked = KeyedQuotas(UNCHECKED_PER_INTERVAL / interval, UNCHECKED)
        self._newcomers = KeyedQuotas(NEWCOMERS_PER_INTERVAL / interval, NEWCOMERS)
        self._asks = KeyedQuotas(1 / (ASK_INTERVALS * interval), ASKS)
        self._refusals = RateLimit(REFUSALS_PER_INTERVAL / interval, REFUSALS)
        self._walks = KeyedQuotas(1 / (WALK_INTERVALS * interval), 1.0)
        self._network_walks = KeyedQuotas(
            1 / (NETWORK_WALK_INTERVALS * interval), NETWORK_WALKS
        )
        self._network_refusals = KeyedQuotas(
            NETWORK_REFUSALS_PER_INTERVAL / interval,
            NETWORK_REFUSALS,
        )
        self._forwarded_walks = KeyedQuotas(
            FORWARDED_WALKS_PER_INTERVAL / interval,
            FORWARDED_WALKS,
        )
        self._answered = KeyedQuotas(ANSWERED_PER_INTERVAL / interval, ANSWERED)
        self._answered_to_others = RateLimit(
            ANSWERED_TO_OTHERS_PER_INTERVAL / interval, ANSWERED_TO_OTHERS
        )

    def trusts_suspicions(self, now: float) -> bool:
        """Whether few suspicions were refuted lately."""
        return self._trust.available(now) >= 1

    def count_refutation(self, peer: PeerId, ahead: int, now: float) -> None:
        """A suspicion of ``peer`` was refuted by a heartbeat whose number is ``ahead`` of the
        suspected one."""
        if ahead >= RESTART and self._restarts.take(peer, now):
            return  # it was true
        self._trust.level = max(self._trust.available(now) - 1, -TRUST)

    def may_check(self, source: PeerId, now: float) -> bool:
        """Whether to ask a suspected peer ourselves, because of ``source``."""
        return self._checks.take(source, now)

    def may_check_before_death(self, now: float) -> bool:
        """Whether to ask a suspected peer ourselves, because we are about to declare it
        dead."""
        return self._final_checks.allows(1, now)

    def may_flood_unchecked(self, source: PeerId, now: float) -> bool:
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
        return self._refusals.allows(1, now)

    def may_walk(self, peer: PeerId, network: bytes | None, now: float) -> bool:
        """Whether to send the heartbeat of a newcomer in ``network`` on its walks."""
        if not self._walks.take(peer, now):
            return False
        return network is None or self._network_walks.take(network, now)

    def may_forward_walk(self, source: PeerId, now: float) -> bool:
        """Whether to pass on a walk that comes from ``source``."""
        return self._forwarded_walks.take(source, now)

    def may_answer(self, peer: PeerId, count: int, now: float, *, is_neighbour: bool) -> bool:
        """Whether to hand ``peer`` so many heartbeats that it asks for."""
        if not self._answered.take(peer, now, count):
            return False
        return is_neighbour or self._answered_to_others.allows(count, now)
