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
neighbour: suspicions of unknown peers, and good-byes.

*Answers* are larger than questions. What a node sends because another asks is counted in
heartbeats: those that were asked for, the walks of a newcomer, and refused requests to be
neighbours. There is one quota for what each peer asks for, one for what all strangers ask for,
one for the requests of each public network, and one for those of no network. So no network
keeps us from answering another. A peer's heartbeat walks once in a while, however often it
joins.
"""

from __future__ import annotations

from typing import Final

from p2p.bounded import KeyedQuotas, RateLimit
from p2p.identity import PeerId

RESTART: Final = 1000
"""Minimum jump of the sequence number that indicates a restart of the peer. A running node
counts by one, and a restarted one begins at its clock in milliseconds. Such a refutation costs
no trust."""


class FloodQuotas:
    """Quotas of forwarded and answered messages, in tokens per interval with a burst."""

    def __init__(self, interval: float) -> None:
        # Refuted suspicions after which suspicions are checked before they are passed on, and
        # the rate at which they are forgiven. Not every false suspicion is a lie: a machine
        # that slept for a minute is suspected, and refutes when it wakes. The rate must cover
        # machines of a large swarm that wake up by chance; a liar may send as many for ever.
        self._trust = RateLimit(1 / (2.0 * interval), 16.0)
        # Until one peer's next restart takes no trust: two minutes at 5 s. A peer may say of
        # its number what it likes, and have accomplices suspect it: so often each can make all
        # others pass on a suspicion and a refutation, as it could by being started again in
        # truth.
        self._restarts = KeyedQuotas(1 / (24.0 * interval), 1.0)
        # Checks that one neighbour may cause: 46 bytes a second for each liar among them. The
        # node itself may check as many members that are about to be declared dead.
        self.checks = KeyedQuotas(1 / (2.0 * interval), 16.0)
        # Floods that a neighbour may start without our being able to check them: a zone of 200,
        # if the other neighbours tell of the rest; later 300 bytes a second from seven.
        self.unchecked = KeyedQuotas(1 / 4 / interval, 32.0)
        # Requests of one peer to be a neighbour: a newcomer asks after 1, 2, 4 s, an honest
        # peer that was refused waits for six intervals.
        self.asks = KeyedQuotas(1 / (6.0 * interval), 4.0)
        # Joins of one peer after which its heartbeat walks. Identities that each name a network
        # of their own joined every 40 s, and made a swarm send 25 bytes for each of theirs.
        self.walks = KeyedQuotas(1 / (120.0 * interval), 1.0)
        # Heartbeats that one peer makes us send: a newcomer's whole view, 205, or the walks of
        # a crowd that joins through a neighbour; later half of what it may ask all its
        # neighbours for (`refresh`).
        self.answers = KeyedQuotas(8.0 / interval, 512.0)
        # Those that requests to be neighbours from one public network make a swarm send: the
        # walks of 16 newcomers, later one in 8 intervals. Many identities behind one address
        # need none: each is answered, and told others to ask.
        self._network = KeyedQuotas(2.5 / interval, 320.0)
        # Those of requests from no public network, and those that strangers ask for: 350
        # newcomers that walk, and ask for all they were told of; later 0.8 KB a second. A node
        # that does not live next to us has neighbours of its own to ask. While both were one,
        # 32 strangers that asked for all silenced us to newcomers of no network.
        self._placeless = RateLimit(16.0 / interval, 16384.0)
        self._strangers = RateLimit(16.0 / interval, 16384.0)

    def trusts_suspicions(self, now: float) -> bool:
        """Return True if few suspicions were refuted recently."""
        return self._trust.available(now) >= 1

    def count_refutation(self, peer: PeerId, ahead: int, now: float) -> None:
        """Reduce trust after a suspicion of ``peer`` was refuted, unless the peer was
        restarted. The refuting heartbeat's number is ``ahead`` of the suspected one."""
        if ahead >= RESTART and self._restarts.take(peer, now):
            return  # it was true
        self._trust.level = max(self._trust.available(now) - 1, -self._trust.capacity)

    def may_answer(self, peer: PeerId, count: int, now: float, *, free: float) -> bool:
        """Return True if ``peer`` may get ``count`` heartbeats. Those beyond ``free`` are
        counted with what all strangers ask for."""
        if not self.answers.take(peer, now, count):
            return False
        is_free = self.answers.level(peer, now) >= 512.0 - free
        return is_free or self._strangers.allows(count, now)

    def may_link(self, network: bytes | None, cost: int, now: float) -> bool:
        """Return True if a request to be a neighbour, from a public ``network`` or none, may
        cost so many heartbeats."""
        if network is None:
            return self._placeless.allows(cost, now)
        return self._network.take(network, now, cost)
