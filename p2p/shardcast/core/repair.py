"""Have-lists and pulls: what neighbours tell and ask each other about a policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Final

from p2p.identity import PeerId
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import SLOW_LINK, Policy
from p2p.shardcast.core.peers import Peers
from p2p.shardcast.core.sources import Repair
from p2p.shardcast.core.statements import Known
from p2p.shardcast.forest import plant
from p2p.shardcast.messages import Ask, Have, Skipped, Taken, Want, ranges_of

_MAX_BACKOFF: Final = 5
"""Doublings of the time between inquiries: 16 s at the usual patience."""
_INQUIRIES: Final = 4
"""Peers asked at a time what they have of a policy: one of them will know, and four are soon told."""


class Exchange:
    """Says what came, asks who has what, pulls what is late."""

    def __init__(self, local: PeerId, known: Known, peers: Peers, repair: Repair, rng: Random) -> None:
        self._local = local
        self._known = known
        self._peers = peers
        self._repair = repair
        self._rng = rng

    def say(self, policy: Policy) -> Iterator[ev.Effect]:
        """Tell neighbours and listeners what we got since we last did, and children what we do not push."""
        mask, policy.unsaid, policy.say_at = policy.unsaid, 0, math.inf
        for peer in self._audience(policy):
            if policy.holders.get(peer) != policy.full:
                yield from (ev.Send(peer, Have(policy.manifest.digest, part)) for part in ranges_of(mask))
        skipped, policy.skipped = policy.skipped, {}
        for peer, masks in skipped.items():
            if self._peers.is_gone(peer):
                continue
            for (epoch, stripe), chunks in masks.items():
                for part in ranges_of(chunks):
                    yield ev.Send(peer, Skipped(policy.manifest.digest, epoch, stripe, part))

    def _audience(self, policy: Policy) -> list[PeerId]:
        """Neighbours, listeners and parents, but for the origin, who has everything."""
        origin = policy.manifest.trainer
        roster = self._known.roster(origin)
        peers = dict.fromkeys(roster.neighbours(self._local) if roster is not None else ())
        peers.update(policy.listeners)
        peers.update(dict.fromkeys(self._feeders(policy)))
        return [peer for peer in peers if peer != origin and not self._peers.is_gone(peer)]

    def inquire(self, policy: Policy, now: float) -> Iterator[ev.Effect]:
        """Ask some others what they have; if nobody else is there, or none helped, turn to the origin."""
        name, origin = policy.manifest.digest, policy.manifest.trainer
        roster = self._known.roster(origin)
        fed = roster.peers if roster is not None and policy.eager else ()
        others = dict.fromkeys([*self._audience(policy), *self._peers.up, *fed])
        candidates = [p for p in others if p not in (origin, self._local) and not self._peers.is_gone(p)]
        chosen = self._rng.sample(candidates, min(_INQUIRIES, len(candidates)))
        policy.asks += 1
        policy.ask_at = now + policy.silence * 2 ** min(policy.asks - 1, _MAX_BACKOFF)
        if not chosen or policy.asks > 1:
            policy.last_resort = True
            if policy.index is None:
                chosen.append(origin)
        yield from (ev.Send(peer, Ask(name, policy.index is None)) for peer in chosen)

    def pull(self, policy: Policy, now: float) -> Iterator[ev.Effect]:
        """Ask for what is late, and tell those who would push it that it is taken."""
        if policy.whole:
            return
        plan = self._repair.pull(policy, now, lambda peer: self._rate(policy, peer))
        name = policy.manifest.digest
        taken = {peer: sum(1 << chunk for chunk in chunks) for peer, chunks in plan.items()}
        yield from (ev.Send(peer, Want(name, tuple(chunks))) for peer, chunks in plan.items())
        if not taken or policy.eager:
            return
        for peer in self._feeders(policy):
            mask = sum(taken.values()) - taken.get(peer, 0)
            yield from (ev.Send(peer, Taken(name, part)) for part in ranges_of(mask))

    def cancel(self, policy: Policy, chunks: dict[int, PeerId]) -> Iterator[ev.Effect]:
        """Tell those of whom these chunks were asked that they are no longer awaited."""
        masks: dict[PeerId, int] = {}
        for index, peer in chunks.items():
            masks[peer] = masks.get(peer, 0) | 1 << index
        for peer, mask in masks.items():
            if peer != policy.manifest.trainer and not self._peers.is_gone(peer):
                yield from (ev.Send(peer, Taken(policy.manifest.digest, part)) for part in ranges_of(mask))

    def decline(self, policy: Policy) -> Iterator[ev.Effect]:
        """Tell those who push chunks of a policy, or were asked for some, that none are needed here."""
        asked = (request.peer for request in policy.requests.values())
        for peer in dict.fromkeys([*self._feeders(policy), *asked]):
            if peer != policy.manifest.trainer and not self._peers.is_gone(peer):
                yield ev.Send(peer, Taken(policy.manifest.digest, ((0, policy.count),)))

    def _feeders(self, policy: Policy) -> tuple[PeerId, ...]:
        """Who would push chunks to us, but for the origin: what it gives has to be confirmed."""
        roster = self._known.roster(policy.manifest.trainer)
        if roster is None:
            return ()
        return plant(roster, policy.manifest.version).feeders(self._local, self._peers.is_gone)

    def _rate(self, policy: Policy, peer: PeerId) -> float:
        """What to expect of ``peer``'s uplink, in bytes per second; 0 if it is gone."""
        if self._peers.is_gone(peer):
            return 0.0
        roster = self._known.roster(policy.manifest.trainer)
        if roster is None or peer not in roster.positions:
            return SLOW_LINK
        return max(roster.upload(peer), SLOW_LINK / 8)
