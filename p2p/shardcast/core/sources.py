"""Whom to ask for what the forest did not bring: pull from any holder, the origin last."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.core.download import SLOW_LINK, ChunkEvent, Policy, Request

WINDOW: Final = 4
"""Chunks asked of one holder at a time: enough that it never idles for a round trip, few enough to lose
little when it dies."""
_TRIAL: Final = 1
"""Chunks asked of a holder that has brought none yet: whoever claims much and drips costs its asker one."""
_AHEAD: Final = 2
"""Shortest patiences' worth of chunks, at the rate at which they come, that may be asked for in all: what
is asked for beyond what the own line carries only waits, passes its deadline, and comes twice."""
_PUSHED: Final = 24
"""Chunks that may be ahead without having been asked for: eight parents have two under way, one waiting."""
_LATE: Final = 4
_SMOOTHING: Final = 0.25
_QUICKEST: Final = 0.001
"""Seconds per chunk below which nobody is taken for faster: 64 KiB chunks at half a gigabit a second."""
_SLOWEST: Final = 60.0
"""Seconds per chunk beyond which a holder's estimate does not grow: it is tried once a minute then."""


@dataclass(slots=True)
class _Holder:
    chunk_time: float
    owed: int = 0
    came: float = 0.0


class Repair:
    """Requests under way, and how fast each holder answers."""

    def __init__(self, rng: Random, stall: float) -> None:
        self._rng = rng
        self._stall = stall
        self._holders: dict[PeerId, _Holder] = {}

    def pull(self, policy: Policy, now: float, rate: Callable[[PeerId], float]) -> dict[PeerId, list[int]]:
        """Ask for what is late; returns the chunks to want, by holder.

        ``rate`` is what a peer claims to upload in bytes per second; 0 if it cannot be asked.
        """
        late = policy.late(now)
        if not late or policy.index is None:
            return {}
        plan: dict[PeerId, list[int]] = {}
        room = max(WINDOW, math.ceil(_AHEAD * self._stall / max(policy.chunk_time, _QUICKEST)))
        room -= len(policy.requests)
        origin = policy.manifest.trainer
        claims = {peer: claim for peer in policy.holders if peer != origin and (claim := rate(peer))}
        held = 0
        for peer in claims:
            held |= policy.holders[peer]
        for peer, index in islice(self._spread(policy, claims, late), max(0, room)):
            plan.setdefault(peer, []).append(index)
            self._ask(policy, peer, index, now)
        orphans = policy.missing & late & ~held
        if not policy.last_resort:
            orphans &= policy.failed
        if orphans and (claim := rate(origin)):
            open_to = WINDOW - self._meet(policy, origin, claim).owed  # it may answer along a stripe
            for index in self._pick(orphans, min(open_to, room - sum(map(len, plan.values())))):
                plan.setdefault(origin, []).append(index)
                self._ask(policy, origin, index, now)
        return plan

    def _spread(self, policy: Policy, claims: dict[PeerId, float], late: int) -> Iterator[tuple[PeerId, int]]:
        """Each chunk to the holder that would bring it first, while any has room and something to give."""
        order, own = list(claims), policy.chunk_time
        self._rng.shuffle(order)
        open_to = {peer: self._meet(policy, peer, claims[peer]) for peer in order}
        while open_to:
            # Beyond the own line's rate nobody is fast, and several at once are better than one.
            peer = min(open_to, key=lambda p: (open_to[p].owed + 1) * max(open_to[p].chunk_time, own))
            index = next(self._pick(policy.holders[peer] & late, self._room(peer)), None)
            if index is None:
                del open_to[peer]
                continue
            late &= ~(1 << index)
            yield peer, index

    def _meet(self, policy: Policy, peer: PeerId, claim: float) -> _Holder:
        holder = self._holders.get(peer)
        if holder is None:
            holder = self._holders[peer] = _Holder(policy.manifest.anchor.wire / policy.count / claim)
        return holder

    def _pick(self, mask: int, count: int) -> Iterator[int]:
        """Up to ``count`` bits of ``mask``, from a random place on, so that askers differ."""
        low = (mask & -mask).bit_length() - 1
        start = self._rng.randrange(low, mask.bit_length()) if mask and count > 0 else 0
        while mask and count > 0:
            above = mask >> start << start
            chosen = (above or mask) & -(above or mask)
            yield chosen.bit_length() - 1
            mask ^= chosen
            count -= 1

    def _room(self, peer: PeerId) -> int:
        holder = self._holders.get(peer)
        if holder is None:
            return _TRIAL
        return (WINDOW if holder.came else _TRIAL) - holder.owed

    def _ask(self, policy: Policy, peer: PeerId, index: int, now: float) -> None:
        holder = self._holders[peer]
        holder.owed += 1
        policy.advance(index, ChunkEvent.ASK)
        policy.requests[index] = Request(peer, now, now + self._patience(holder, policy))

    def _patience(self, holder: _Holder, policy: Policy) -> float:
        usual = max(self._stall, _LATE * holder.chunk_time) + holder.owed * holder.chunk_time
        # However slow a holder is, others may have got the chunk meanwhile: look around again.
        slow_link = policy.manifest.anchor.wire / policy.count / SLOW_LINK
        usual = min(usual, max(_LATE * self._stall, 2 * _LATE * slow_link))
        # What is asked for waits on our own line behind what else was asked for, and what parents push.
        return max(usual, (len(policy.requests) + _PUSHED) * policy.chunk_time)

    def came(self, policy: Policy, index: int, peer: PeerId, now: float) -> bool:
        """A chunk came; returns whether it had been asked of ``peer``. Call before the policy's `advance`."""
        request = policy.requests.get(index)
        holder = self._holders.get(request.peer) if request is not None else None
        if request is None or holder is None:
            return False
        holder.owed = max(0, holder.owed - 1)
        if request.peer != peer:
            return False
        took = now - max(request.asked, holder.came)
        holder.chunk_time += _SMOOTHING * (took - holder.chunk_time)
        holder.came = now
        for other in policy.requests.values():
            if other.peer == peer:
                other.deadline = max(other.deadline, now + self._patience(holder, policy))
        return True

    def expire(self, policy: Policy, now: float) -> dict[int, PeerId]:
        """Give up requests past their deadline, and expect less of those who let them pass; returns them."""
        overdue = policy.expire(now)
        for request in overdue.values():
            self._settle(policy, request.peer)
            holder = self._holders.get(request.peer)
            if holder is not None:
                waited = now - max(request.asked, holder.came)
                holder.chunk_time = min(_SLOWEST, max(2 * holder.chunk_time, waited))
        return {index: request.peer for index, request in overdue.items()}

    def _settle(self, policy: Policy, peer: PeerId) -> None:
        holder = self._holders.get(peer)
        if holder is not None:
            holder.owed = min(holder.owed, sum(r.peer == peer for r in policy.requests.values()))

    def forget(self, policy: Policy) -> None:
        """A policy is no longer fetched: nobody owes its chunks."""
        for request in policy.requests.values():
            holder = self._holders.get(request.peer)
            if holder is not None:
                holder.owed = max(0, holder.owed - 1)

    def lose(self, peer: PeerId) -> None:
        """Forget a holder."""
        self._holders.pop(peer, None)
