"""Quotas for each peer, of the floods and answers that it may cause.

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

from p2p.bounded import KeyedQuotas, RateLimit
from p2p.identity import PeerId

QUOTA_UNIT: Final = 256
"""Bytes per unit of a connection's quota, about one heartbeat (180 to 250). A long message thus
costs as much as the short ones in it."""
QUOTA_RATE: Final = 200.0
"""Units per second that one peer may send. A neighbour in a storm sends up to 160; verifying
200 takes about 1.5 % of a core."""
QUOTA_BURST: Final = 2000.0
"""Units that one peer may send at once: the death of 1,000 peers in one zone, reported from
both sides of it."""

TRUST: Final = 16.0
"""Number of refuted suspicions after which suspicions are checked before they are passed on.
Not every false suspicion is a lie: a machine that slept for a minute is suspected, and refutes
when it wakes."""
RESTART: Final = 1000
"""Minimum jump of the sequence number that indicates a restart of the peer. A running node
counts by one, and a restarted one begins at its clock in milliseconds. Such a refutation costs
no trust."""


class FloodQuotas:
    """Quotas of forwarded and answered messages, in tokens per interval with a burst."""

    def __init__(self, interval: float) -> None:
        # Intervals after which one refuted suspicion is forgiven. The rate must cover machines
        # of a large swarm that wake up by chance; a liar may send as many for ever.
        self._trust = RateLimit(1 / (2.0 * interval), TRUST)
        # Until one peer's next restart takes no trust: two minutes at 5 s. A peer may say of
        # its number what it likes, and have accomplices suspect it: so often each can make all
        # others pass on a suspicion and a refutation, as it could by being started again in
        # truth.
        self._restarts = KeyedQuotas(1 / (24.0 * interval), 1.0)
        # Checks that one neighbour may cause: 46 bytes a second for each liar among them.
        self.checks = KeyedQuotas(1 / (2.0 * interval), 4.0)
        # Checks of members that were suspected while the node still trusted suspicions, and are
        # about to be declared dead.
        self.final_checks = RateLimit(1 / (2.0 * interval), 16.0)
        # Floods that a neighbour may start without our being able to check them: a zone of 200,
        # if the other neighbours tell of the rest; later 300 bytes a second from seven.
        self.unchecked = KeyedQuotas(1 / 4 / interval, 32.0)
        # Newcomers that a neighbour names, and that we name to all others: a crowd that starts
        # together; later a swarm that grows by 5,000 in an hour.
        self.newcomers = KeyedQuotas(1.0 / interval, 256.0)
        # Requests of one peer to be a neighbour: a newcomer asks after 1, 2, 4 s, an honest
        # peer that was refused waits for six intervals (`AVOID`).
        self.asks = KeyedQuotas(1 / (6.0 * interval), 4.0)
        # Refusals to all together, 0.7 KB each with the names of others; who gets none takes
        # our silence for one. One public network gets an eighth, so that it takes eight to make
        # us silent to the others.
        self._refusals = RateLimit(4.0 / interval, 256.0)
        self._network_refusals = KeyedQuotas(0.5 / interval, 32.0)
        # Joins of one peer, and of one public network, after which a heartbeat walks: twenty
        # messages each. Many identities behind one address need none: each is answered, and
        # told others to ask.
        self._walks = KeyedQuotas(1 / (120.0 * interval), 1.0)
        self._network_walks = KeyedQuotas(1 / (8.0 * interval), 16.0)
        # Walks that one neighbour may send through us, twice as many as newcomers that it may
        # name. Each costs three messages at most.
        self.forwarded_walks = KeyedQuotas(4.0 / interval, 512.0)
        # Heartbeats that one peer gets: a newcomer's whole view, 205, with room; later half of
        # what it may ask all its neighbours for (`refresh`).
        self._answered = KeyedQuotas(8.0 / interval, 256.0)
        # Heartbeats for all who are no neighbours: 350 newcomers that ask for all they were
        # told of; later 200 bytes a second. A node that does not live next to us has neighbours
        # of its own to ask.
        self._answered_to_others = RateLimit(4.0 / interval, 8192.0)

    def trusts_suspicions(self, now: float) -> bool:
        """Return True if few suspicions were refuted recently."""
        return self._trust.available(now) >= 1

    def count_refutation(self, peer: PeerId, ahead: int, now: float) -> None:
        """Reduce trust after a suspicion of ``peer`` was refuted, unless the peer was
        restarted. The refuting heartbeat's number is ``ahead`` of the suspected one."""
        if ahead >= RESTART and self._restarts.take(peer, now):
            return  # it was true
        self._trust.level = max(self._trust.available(now) - 1, -TRUST)

    def may_refuse(self, network: bytes | None, now: float) -> bool:
        """Return True if a refused request from ``network`` should get an answer."""
        if network is not None and not self._network_refusals.take(network, now):
            return False
        return self._refusals.allows(1, now)

    def may_walk(self, peer: PeerId, network: bytes | None, now: float) -> bool:
        """Return True if the heartbeat of newcomer ``peer`` in ``network`` may walk."""
        if not self._walks.take(peer, now):
            return False
        return network is None or self._network_walks.take(network, now)

    def may_answer(self, peer: PeerId, count: int, now: float, *, is_neighbour: bool) -> bool:
        """Return True if ``peer`` may get ``count`` heartbeats."""
        if not self._answered.take(peer, now, count):
            return False
        return is_neighbour or self._answered_to_others.allows(count, now)
