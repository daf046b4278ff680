"""Selection of heartbeats to request from the digests of peers, within a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from p2p.bounded import KeyedQuotas, RateLimit
from p2p.identity import PeerId
from p2p.membership.config import MembershipConfig
from p2p.membership.core.member_list import Liveness, MemberList
from p2p.membership.heartbeat import Digest
from p2p.membership.messages import MAX_KEYS

MAX_ASKED: Final = 1024
"""Maximum number of requested keys. They are remembered for an interval so that no other peer
is asked for them too."""


class Pull:
    """Decides which heartbeats to ask for, and remembers the requests."""

    def __init__(self, members: MemberList, config: MembershipConfig) -> None:
        self._members = members
        self._interval = config.interval
        # A newcomer may spend the budget of so many intervals at once: it has a whole view to
        # fill.
        burst = 16 * config.refresh
        self._budget = RateLimit(config.refresh / config.interval, burst)
        self._asked: dict[bytes, tuple[float, PeerId | None]] = {}
        """Maps each requested key to the time of the request and the peer whose digest named
        it, oldest first."""
        # Heartbeats that a peer may have named without handing them over before its digests are
        # passed over: as many as one request asks for. Digests are unsigned, and ghosts would
        # use up our budget.
        # How many of them are forgiven in an interval: the dead that an honest peer still names
        # are fewer.
        self._unanswered = KeyedQuotas(1.0 / config.interval, 64.0)
        self._batch_at = -math.inf

    def sought(self, key: bytes, now: float) -> None:
        """Note a request that no digest caused, so that no peer is blamed if nothing comes."""
        if len(self._asked) < MAX_ASKED:
            self._asked.pop(key, None)
            self._asked[key] = now, None

    def arrived(self, key: bytes) -> bool:
        """Note that the heartbeat for ``key`` came, and return True if it was requested."""
        return self._asked.pop(key, None) is not None

    def wanted(
        self, digests: Iterable[Digest], source: PeerId, now: float
    ) -> tuple[bytes, ...]:
        """Return the keys to request from ``source``, the sender of ``digests``."""
        asked, by_key = self._asked, self._members.by_key
        while asked and asked[oldest := next(iter(asked))][0] <= now - self._interval:
            _, silent = asked.pop(oldest)
            if silent is not None:
                self._unanswered.charge(silent, now)
        if not self._unanswered.has(source, now):
            return ()
        is_batch = now >= self._batch_at
        room = self._members.room - len(asked)  # who is on the way needs some of it
        # Number of free seats that can wait for a request. A large view with 1 % of free seats
        # is as good a sample.
        if room <= 2 and not is_batch and not self._members.is_sparse():
            room = 0
        may_ask_unknown = is_batch  # one each time: a full view is renewed within an hour
        plenty = self._budget.capacity / 2
        keys: list[bytes] = []
        for key, seqno, policy in digests:
            member = by_key(key)
            if member is None:
                if (room <= 0 and not may_ask_unknown) or key in asked:
                    continue
                if self._members.is_outdated(key, seqno):
                    continue
                if room <= 0:
                    may_ask_unknown = False
                room -= 1
            # Intervals after which a member's heartbeat is fetched again though nothing in its
            # digest changed: as long before it is `stale` (120), time for several neighbours to
            # name it.
            elif (
                seqno <= member.seqno
                or (
                    policy == member.policy
                    and (not is_batch or now - member.seen <= 60.0 * member.interval)
                    and ((watch := member.watch) is None or watch.liveness is Liveness.ALIVE)
                )
                or key in asked
                or (member.liveness is Liveness.ALIVE and self._budget.available(now) <= plenty)
            ):
                continue
            is_full = len(keys) == MAX_KEYS or len(asked) == MAX_ASKED
            if is_full or not self._budget.allows(1, now):
                break
            keys.append(key)
            asked[key] = now, source
        if keys and is_batch:
            # Intervals between two requests that can wait: those for old entries, and those for
            # the last two seats. One message then asks for several heartbeats.
            self._batch_at = now + 3.0 * self._interval
        return tuple(keys)
