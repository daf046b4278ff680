"""SHARDCAST as one state machine: origin, relay and leaf are the same node in different moments.

Theory of operation
-------------------
The *origin* signs a roster and a manifest, and gives each chunk once, to a root of the forest that has
credit (`handout`). A *relay* that gets a chunk along a stripe checks its digest and queues it for its
children at once, before it is on disk; news that explain the chunk go ahead of it on the same stream.
Credit is honest: a root confirms every chunk to the origin, and asks for more only while its own children
lag by fewer than two chunks on average. If a child is gone, its children are served in its place.

What the forest loses is *pulled*. Neighbours tell each other what they have, in batches. A chunk that
others have had for longer than it usually takes to get here is asked for, from any holder but the origin;
the origin is asked when nothing has come for twice that long and nobody else has it. A node outside the
roster lives by pulling alone. Before a chunk is pulled, the neighbours hear that it is *taken*.

At most two versions are fetched at a time: the newest, and the one before it while it may still come
first. An origin starts to hand out a version when the one before has left, and passes over those in
between; so a run that publishes faster than its links carry still delivers.
"""

from __future__ import annotations

import math
from random import Random
from typing import Any, Final, assert_never

from p2p.identity import PeerId
from p2p.shardcast import events as ev
from p2p.shardcast.config import ShardcastConfig, ShardcastStats
from p2p.shardcast.forest import plant
from p2p.shardcast.handout import HandOut
from p2p.shardcast.known import Known
from p2p.shardcast.manifest import NO_POLICY, Equivocation, Index, Manifest, decode_index_untrusted, digest_of
from p2p.shardcast.messages import (
    INLINE_INDEX,
    Ask,
    Blame,
    ChunkHeader,
    Credit,
    Evidence,
    Have,
    Hello,
    Message,
    PolicyNews,
    RosterNews,
    Taken,
    Want,
    mask_of,
    ranges_of,
)
from p2p.shardcast.policy import SLOW_LINK, ChunkEvent, Policy
from p2p.shardcast.relay import Relay, news_of
from p2p.shardcast.repair import Repair

HAVE_DELAY: Final = 0.1
"""Seconds for which have-lists are collected: a fifth of the shortest patience, a tenth of the messages."""
MAX_FETCHES: Final = 2
"""Versions fetched at a time."""
_MAX_REMEMBERED: Final = 4096
"""Peers known to be gone, connected or lying: a roster's worth. The oldest is forgotten first."""
_MAX_DONE: Final = 256
"""Policies remembered as not to be fetched (again); names of 32 bytes."""
_MAX_EARLY: Final = 16
"""Unknown policies, and askers of each, that will be answered once we hear of them ourselves."""
_MAX_BACKOFF: Final = 5
"""Doublings of the time between inquiries: 16 s at the usual patience."""
_INQUIRIES: Final = 4
"""Peers asked at a time what they have of a policy: one of them will know, and four are soon told."""


class ShardcastCore:
    """One node's part in distributing policies: events and time in, effects out."""

    def __init__(self, local: PeerId, config: ShardcastConfig, known: Known, rng: Random) -> None:
        self.stats = ShardcastStats()
        self.newest: Manifest | None = None
        """The newest policy that is whole and assembled here."""
        self._local = local
        self._config = config
        self._known = known
        self._rng = rng
        self._repair = Repair(rng, config.stall)
        self._policies: dict[bytes, Policy] = {}
        self._relay = Relay(local, known, self._policies, self._is_gone)
        self._pending: ev.Publish | None = None
        self._up: dict[PeerId, None] = {}
        self._lost: dict[PeerId, None] = {}
        self._liars: dict[PeerId, None] = {}
        self._done: dict[bytes, None] = {}
        self._wondered: dict[bytes, None] = {}
        self._early: dict[bytes, dict[PeerId, None]] = {}
        self._out: list[ev.Effect] = []
        self._now = -math.inf

    def __repr__(self) -> str:
        return f"ShardcastCore({self._local!r}, newest {self.newest!r}, {len(self._policies)} policies)"

    @property
    def policies(self) -> tuple[Policy, ...]:
        """Every policy that is held or being fetched."""
        return tuple(self._policies.values())

    @property
    def next_deadline(self) -> float:
        """When to deliver the next `Tick`; infinite if nothing waits."""
        due = [policy.next_deadline for policy in self._policies.values()]
        due += [handout.next_deadline for handout in self._relay.handouts.values()]
        if self._pending is not None:
            due += [h.progress + self._overtime for h in self._relay.handouts.values() if not h.exhausted]
        return min(due, default=math.inf)

    @property
    def _overtime(self) -> float:
        """Seconds without a chunk given away after which a hand-out no longer delays the next."""
        return 4 * self._config.stall

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Advance by one event and return what to do about it. `BadMessage` is the peer's fault."""
        self._now = now
        self._out = []
        match event:
            case ev.Heard(peer, message, gossip):
                self._heard(peer, message, gossip)
            case ev.ChunkCame(peer, header, data):
                self._chunk_came(peer, header, data)
            case ev.ChunkSent(peer, size):
                self._chunk_sent(peer, size)
            case ev.PeerUp(peer):
                self._peer_up(peer)
            case ev.PeerLost(peer):
                self._peer_lost(peer)
            case ev.Publish():
                self._publish(event)
            case ev.Resumed():
                self._resume(event)
            case ev.Stored(policy):
                self._stored(policy)
            case ev.Unusable(policy) | ev.Forgotten(policy):
                self._forget(policy)
            case ev.Tick():
                self._tick()
            case _:
                assert_never(event)
        self._flow()
        return self._out

    # What comes in: news

    def _heard(self, peer: PeerId, message: Message, gossip: bool) -> None:
        if not gossip:
            if peer in self._liars:
                return
            self._lost.pop(peer, None)
        match message:
            case PolicyNews():
                self._policy_news(message, gossip)
            case RosterNews(data):
                if self._known.roster_untrusted(data) is not None and gossip:
                    self._out.append(ev.PassOn())
            case Evidence():
                evidence = self._known.evidence_untrusted(message)
                if evidence is not None:
                    self._halt(evidence)
                    self._out += [ev.PassOn()] if gossip else []
            case Hello(newest):
                self._answer_hello(peer, newest)
            case Ask(name, wants_index):
                self._answer_ask(peer, name, wants_index)
            case Have(name, ranges):
                self._peer_has(peer, name, mask_of(ranges))
            case Taken(name, ranges):
                policy = self._policies.get(name)
                if policy is not None and not policy.skips(peer, mask_of(ranges)):
                    self._convict(peer, "took chunks that do not exist")
            case Want(name, chunks):
                self._answer_want(peer, name, chunks)
            case Credit(name, received, granted):
                handout = self._relay.handouts.get(name)
                if handout is not None and not handout.credit(peer, received, granted, self._now):
                    self._convict(peer, "confirmed chunks that it was never given")
            case Blame(name, accused):
                handout = self._relay.handouts.get(name)
                if handout is not None:
                    handout.blame(accused, peer)
            case _:
                assert_never(message)

    def _policy_news(self, news: PolicyNews, gossip: bool) -> None:
        manifest = self._known.manifest_untrusted(news.manifest)
        if not self._known.believes(manifest.trainer):
            return
        evidence = self._known.file(manifest)
        if evidence is not None:
            self._halt(evidence)
            return
        policy = self._policies.get(manifest.digest)
        if policy is None:
            policy = self._adopt(manifest)
            if policy is None:
                return
            if gossip:
                self._out.append(ev.PassOn())
        if policy.index is None and news.index:
            policy.index = decode_index_untrusted(news.index, manifest.anchor, manifest.size)
            self._out.append(ev.Begin(manifest, policy.index))
        if (policy.eager and not policy.asks) or policy.index is None:
            self._inquire(policy)

    def _adopt(self, manifest: Manifest) -> Policy | None:
        """Start to fetch a version, if it is worth it; at most `MAX_FETCHES` at a time."""
        stale = self.newest is not None and manifest.version <= self.newest.version
        if stale or manifest.digest in self._done:
            return None
        policy = Policy(manifest, self._now, self._config.stall)
        roster = self._known.roster(manifest.trainer)
        policy.eager = roster is None or self._local not in roster.positions
        for peer in self._early.pop(manifest.digest, {}):
            policy.listen(peer)
        self._policies[manifest.digest] = policy
        fetches = sorted(
            (p for p in self._policies.values() if not p.whole), key=lambda p: p.manifest.version
        )
        if len(fetches) > MAX_FETCHES:
            # The newest, and of the others the one that will be whole first: a node slower than the
            # run publishes would otherwise give up every version for the next, and never have any.
            best = max(fetches[:-1], key=lambda p: p.verified.bit_count() / p.count)
            for fetch in fetches[:-1]:
                if fetch is not best:
                    self._abandon(fetch)
        return policy if manifest.digest in self._policies else None

    def _halt(self, evidence: Equivocation) -> None:
        trainer = evidence.trainer
        self._known.halted[trainer] = evidence
        message = Evidence(evidence.first.encode(), evidence.second.encode())
        for policy in [p for p in self._policies.values() if p.manifest.trainer == trainer and not p.whole]:
            self._abandon(policy)
        self._out += [ev.Halt(evidence), ev.Gossip(message)]
        self._out += [ev.Send(peer, message) for peer in self._up]

    def _answer_hello(self, peer: PeerId, newest: int) -> None:
        policy = max(self._policies.values(), key=lambda p: p.manifest.version, default=None)
        if policy is None or policy.manifest.version <= newest:
            return
        roster = self._known.roster(policy.manifest.trainer)
        if roster is not None:
            self._out.append(ev.Send(peer, RosterNews(roster.encode())))
        self._out.append(ev.Send(peer, news_of(policy, INLINE_INDEX)))

    def _answer_ask(self, peer: PeerId, name: bytes, wants_index: bool) -> None:
        policy = self._policies.get(name)
        if policy is None:
            if name not in self._done:
                waiting = self._early.setdefault(name, {})
                waiting[peer] = None
                _bound(waiting, _MAX_EARLY)
                _bound(self._early, _MAX_EARLY)
            return
        if not policy.serve(peer):
            return
        policy.listen(peer)
        if wants_index and policy.index is not None:
            self._relay.lane(peer).tell(name)
            self._out.append(ev.Push(peer, news_of(policy)))
        self._out += [ev.Send(peer, Have(name, ranges)) for ranges in ranges_of(policy.verified)]

    def _answer_want(self, peer: PeerId, name: bytes, chunks: tuple[int, ...]) -> None:
        policy = self._policies.get(name)
        if policy is None or policy.index is None:
            return
        for chunk in chunks:
            if chunk >= policy.count:
                self._convict(peer, "wants a chunk that does not exist")
                return
            handout = self._relay.handouts.get(name)
            if handout is None or not handout.complain(chunk, peer):
                self._relay.serve(peer, policy, chunk)

    def _peer_has(self, peer: PeerId, name: bytes, mask: int) -> None:
        policy = self._policies.get(name)
        if policy is None:
            if name not in self._done and name not in self._wondered:
                self._wondered[name] = None
                _bound(self._wondered, _MAX_DONE)
                self._out.append(ev.Send(peer, Ask(name, True)))
            return
        if not policy.holds(peer, mask, self._now):
            self._convict(peer, "has chunks that do not exist")
        elif not policy.whole:
            self._pull(policy)

    # What comes in: chunks

    def _chunk_came(self, peer: PeerId, header: ChunkHeader, data: bytes) -> None:
        policy = self._policies.get(header.policy)
        if peer in self._liars or policy is None or policy.index is None:
            return  # of a version that was given up, or a chunk that overtook its news after a reconnect
        self._lost.pop(peer, None)
        if header.index >= policy.count:
            self._convict(peer, "sent a chunk that does not exist")
            return
        chunk, bit = policy.index.chunks[header.index], 1 << header.index
        if policy.verified & bit:
            self.stats.duplicates += len(data)
            if peer == policy.manifest.trainer:
                self._relay.forward(policy, header, peer)  # given again, since its first root failed
            return
        asked = self._repair.came(policy, header.index, peer, self._now)
        if len(data) != chunk.wire or digest_of(data) != chunk.digest:
            policy.advance(header.index, ChunkEvent.DIGEST_BAD)
            self.stats.chunks_bad += 1
            self._convict(peer, "sent a chunk with a wrong digest")
            self._out.append(ev.Send(policy.manifest.trainer, Blame(header.policy, peer)))
            return
        policy.advance(header.index, ChunkEvent.DIGEST_OK)
        policy.arrived(header.index, self._now)
        self._count(policy, peer, len(data), asked)
        policy.holds(peer, bit, self._now)
        self._out.append(ev.Keep(header.policy, header.index, data))
        self._relay.forward(policy, header, peer)
        policy.unsaid |= bit
        policy.say_at = min(policy.say_at, self._now + HAVE_DELAY)
        if policy.whole:
            self._say(policy)
            self._out.append(ev.Finish(header.policy))
        elif asked or policy.eager or policy.urgent:
            self._pull(policy)

    def _count(self, policy: Policy, peer: PeerId, size: int, asked: bool) -> None:
        self.stats.chunks_repaired += asked
        if peer == policy.manifest.trainer:
            self.stats.from_origin += size
        else:
            self.stats.from_peers += size

    def _chunk_sent(self, peer: PeerId, size: int) -> None:
        policy = self._relay.sent(peer, self._now)
        if policy is not None and policy.manifest.trainer == self._local:
            self.stats.uploaded_as_origin += size
        else:
            self.stats.uploaded_as_relay += size

    def _stored(self, name: bytes) -> None:
        policy = self._policies.get(name)
        if policy is None:
            return
        policy.stored = True
        self.stats.versions_completed += 1
        self._advance_newest(policy.manifest)

    def _advance_newest(self, manifest: Manifest) -> None:
        if self.newest is None or manifest.version > self.newest.version:
            self.newest = manifest
        for policy in list(self._policies.values()):
            if not policy.whole and policy.manifest.version < self.newest.version:
                self._abandon(policy)

    def _abandon(self, policy: Policy) -> None:
        self.stats.versions_skipped += 1
        self._forget(policy.manifest.digest)
        self._out.append(ev.Abandon(policy.manifest.digest))

    def _forget(self, name: bytes) -> None:
        policy = self._policies.pop(name, None)
        if policy is not None:
            self._repair.forget(policy)
        self._relay.forget(name)
        self._done[name] = None
        _bound(self._done, _MAX_DONE)

    # Our own policies

    def _publish(self, event: ev.Publish) -> None:
        self._known.file(event.manifest)
        if event.roster is not None and self._known.add_roster(event.roster):
            self._out.append(ev.Gossip(RosterNews(event.roster.encode())))
        policy = self._hold(event.manifest, event.index)
        policy.stored = True
        self._advance_newest(event.manifest)
        self._pending = event  # whatever was pending is passed over

    def _hold(self, manifest: Manifest, index: Index) -> Policy:
        policy = Policy(manifest, self._now, self._config.stall)
        policy.index = index
        policy.verified = policy.full
        self._policies[manifest.digest] = policy
        return policy

    def _start_pending(self) -> None:
        """Hand out what is pending once the version before it has left, or got stuck."""
        if self._pending is None:
            return
        handouts = self._relay.handouts
        if any(not h.exhausted and self._now < h.progress + self._overtime for h in handouts.values()):
            return
        manifest, self._pending = self._pending.manifest, None
        policy = self._policies.get(manifest.digest)
        if policy is None:
            return
        self._out.append(ev.Gossip(news_of(policy, INLINE_INDEX)))
        roster = self._known.roster(self._local)
        if roster is not None:
            forest = plant(roster, manifest.version)
            handouts[manifest.digest] = HandOut(policy.count, forest, self._now, policy.patience)
            for peer in [peer for peer in forest.roots if self._is_gone(peer)]:
                handouts[manifest.digest].lose(peer)

    def _resume(self, event: ev.Resumed) -> None:
        """Take up what the disk holds; our own newest policy is announced again."""
        self._known.file(event.manifest)
        policy = self._hold(event.manifest, event.index)
        policy.verified, policy.stored = event.verified, event.stored
        if event.stored:
            self._advance_newest(event.manifest)
        elif policy.whole:
            self._out.append(ev.Finish(event.manifest.digest))
        else:
            policy.eager = True  # its hand-out is over
        if event.manifest.trainer == self._local and event.stored:
            self._pending = ev.Publish(event.manifest, event.index, None)

    # Peers

    def _is_gone(self, peer: PeerId) -> bool:
        return peer in self._lost or peer in self._liars

    def _peer_up(self, peer: PeerId) -> None:
        self._lost.pop(peer, None)
        self._up[peer] = None
        _bound(self._up, _MAX_REMEMBERED)
        newest = max((p.manifest.version for p in self._policies.values()), default=NO_POLICY)
        self._out.append(ev.Send(peer, Hello(newest)))

    def _peer_lost(self, peer: PeerId) -> None:
        self._up.pop(peer, None)
        self._lost[peer] = None
        _bound(self._lost, _MAX_REMEMBERED)
        self._repair.lose(peer)
        self._relay.lose(peer)
        for policy in self._policies.values():
            policy.lose(peer)
            if not policy.whole:
                self._pull(policy)

    def _convict(self, peer: PeerId, reason: str) -> None:
        """Never deal with ``peer`` again."""
        self._liars[peer] = None
        _bound(self._liars, _MAX_REMEMBERED)
        self._peer_lost(peer)
        self._out.append(ev.Penalise(peer, reason))

    # What goes out

    def _flow(self) -> None:
        self._start_pending()
        self._relay.give(self._now)
        self._out += self._relay.pump()
        for policy in self._policies.values():
            self._out += self._relay.credit(policy)

    def _tick(self) -> None:
        for handout in self._relay.handouts.values():
            handout.expire(self._now)
        for policy in list(self._policies.values()):
            if policy.say_at <= self._now:
                self._say(policy)
            if policy.whole:
                continue
            policy.ripen(self._now)
            self._repair.expire(policy, self._now)
            if policy.ask_at <= self._now:
                self._inquire(policy)
            self._pull(policy)

    def _say(self, policy: Policy) -> None:
        """Tell neighbours and listeners what we got since we last did."""
        mask, policy.unsaid, policy.say_at = policy.unsaid, 0, math.inf
        for peer in self._audience(policy):
            if policy.holders.get(peer) != policy.full:
                self._out += [ev.Send(peer, Have(policy.manifest.digest, part)) for part in ranges_of(mask)]

    def _audience(self, policy: Policy) -> list[PeerId]:
        """Neighbours and listeners, but for the origin, who has everything."""
        roster = self._known.roster(policy.manifest.trainer)
        peers = dict.fromkeys(roster.neighbours(self._local) if roster is not None else ())
        peers.update(policy.listeners)
        return [p for p in peers if p != policy.manifest.trainer and not self._is_gone(p)]

    def _inquire(self, policy: Policy) -> None:
        """Ask some others what they have; nobody else there, or no answer twice: ask the origin."""
        name, origin = policy.manifest.digest, policy.manifest.trainer
        roster = self._known.roster(origin)
        fed = roster.peers if roster is not None and policy.eager else ()
        others = dict.fromkeys([*self._audience(policy), *self._up, *fed])
        candidates = [p for p in others if p not in (origin, self._local) and not self._is_gone(p)]
        chosen = self._rng.sample(candidates, min(_INQUIRIES, len(candidates)))
        policy.asks += 1
        policy.ask_at = self._now + policy.patience * 2 ** min(policy.asks - 1, _MAX_BACKOFF)
        if not chosen or policy.asks > 1:
            policy.last_resort = True
            if policy.index is None:
                chosen.append(origin)
        self._out += [ev.Send(peer, Ask(name, policy.index is None)) for peer in chosen]

    def _pull(self, policy: Policy) -> None:
        """Ask for what is late, and tell the neighbours that it is taken."""
        plan = self._repair.pull(policy, self._now, lambda peer: self._rate(policy, peer))
        name = policy.manifest.digest
        taken = {peer: sum(1 << chunk for chunk in chunks) for peer, chunks in plan.items()}
        self._out += [ev.Send(peer, Want(name, tuple(chunks))) for peer, chunks in plan.items()]
        if not taken or policy.eager:
            return
        for peer in self._audience(policy):
            mask = sum(taken.values()) - taken.get(peer, 0)
            self._out += [ev.Send(peer, Taken(name, part)) for part in ranges_of(mask)]

    def _rate(self, policy: Policy, peer: PeerId) -> float:
        """What to expect of ``peer``'s uplink, in bytes per second; 0 if it is gone."""
        if self._is_gone(peer):
            return 0.0
        roster = self._known.roster(policy.manifest.trainer)
        if roster is None or peer not in roster.positions:
            return SLOW_LINK
        return max(roster.upload(peer), SLOW_LINK / 8)


def _bound(memory: dict[Any, Any], most: int) -> None:
    """Forget the oldest entry beyond ``most``."""
    if len(memory) > most:
        del memory[next(iter(memory))]
