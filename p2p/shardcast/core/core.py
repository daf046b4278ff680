"""SHARDCAST as one state machine: origin, relay and leaf are the same node in different moments.

Theory of operation
-------------------
The *origin* signs a roster and a manifest, and gives each chunk once, to a root of the forest that has
credit (`handout`). A *relay* that gets a chunk along a stripe checks its digest and queues it for its
children at once, before it is on disk; news that explain the chunk go ahead of it on the same stream.
Credit is honest: a root confirms every chunk to the origin, and asks for more only while at most half of
its children have two chunks waiting. If a child is gone, its children are served in its place.

A child whose line is slower than its siblings' does not hold them up: what is more than its share of four
waiting chunks is *skipped*. It learns of the skipped chunks, fetches them from any holder as fast as its own
line goes, and passes them on to its children: the stripe brings the duty even where it does not bring bytes.

What the forest loses is *pulled*. Neighbours tell each other, and their parents, what they have, in batches.
A chunk that others have had for longer than it usually takes to get here is asked for, from any holder but
the origin; the origin is asked when nothing has come for long and nobody else has it. A node outside the
roster lives by pulling alone. Before a chunk is pulled, the parents hear that it is *taken*; when it comes
from another, whom it was asked of hears so too. Nobody asks for more than its line has lately carried.

At most two versions are fetched at a time: the newest, and the one before it while it may still come
first. An origin starts to hand out a version when the one before has left, and passes over those in
between; so a run that publishes faster than its links carry still delivers.
"""

from __future__ import annotations

import math
from random import Random
from typing import assert_never

from p2p.errors import BadMessage
from p2p.identity import PeerId
from p2p.shardcast.config import ShardcastConfig, ShardcastStats
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.download import MAX_FETCHES, ChunkEvent, Policy, surplus
from p2p.shardcast.core.origin import Origin
from p2p.shardcast.core.peers import Peers
from p2p.shardcast.core.pending import Rumours
from p2p.shardcast.core.repair import Exchange
from p2p.shardcast.core.sources import Repair
from p2p.shardcast.core.statements import Known
from p2p.shardcast.core.upload import Relay, news_of
from p2p.shardcast.manifest import NO_POLICY, Equivocation, Index, Manifest, decode_index_untrusted, digest_of
from p2p.shardcast.messages import (
    INLINE_INDEX,
    NO_STRIPE,
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
    Skipped,
    Taken,
    Want,
    mask_of,
    ranges_of,
)


class ShardcastCore:
    """One node's part in distributing policies: events and time in, effects out."""

    def __init__(self, local: PeerId, config: ShardcastConfig, known: Known, rng: Random) -> None:
        self.stats = ShardcastStats()
        self.newest: Manifest | None = None
        """The newest policy that is whole and assembled here."""
        self._local = local
        self._config = config
        self._known = known
        self._peers = Peers()
        self._repair = Repair(rng, config.stall)
        self._exchange = Exchange(local, known, self._peers, self._repair, rng)
        self._policies: dict[bytes, Policy] = {}
        self._relay = Relay(local, known, self._policies, self._peers.is_gone)
        self._origin = Origin(known, self._relay, self._peers.is_gone, config.stall)
        self._rumours = Rumours()
        self._is_full = False
        """Whether the disk takes nothing: what is announced is put on the shelf instead of fetched."""
        self._shelf: dict[bytes, Manifest] = {}
        """The newest versions that will be fetched once the disk takes data again."""
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
        return min([self._origin.next_deadline, *(p.next_deadline for p in self._policies.values())])

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Advance by one event and return what to do about it. `BadMessage` is the peer's fault."""
        self._now = now
        self._out = []
        match event:
            case ev.Heard(peer, message, gossip):
                self._heard(peer, message, gossip)
            case ev.ChunkCame(peer, header, data):
                self._chunk_came(peer, header, data)
            case ev.ChunkSkipped(peer, header, size):
                self._chunk_skipped(peer, header, size)
            case ev.ChunkSent(peer, size):
                self._chunk_sent(peer, size)
            case ev.PeerUp(peer):
                self._peer_up(peer)
            case ev.PeerLost(peer):
                self._peer_lost(peer)
            case ev.Tick():
                self._tick()
            case _:
                self._disk_says(event)
        self._flow()
        return self._out

    def _disk_says(
        self,
        event: ev.Publish | ev.Resumed | ev.Stored | ev.Unusable | ev.Forgotten | ev.Unwritable | ev.Writable,
    ) -> None:
        match event:
            case ev.Publish():
                self._publish(event)
            case ev.Resumed():
                self._resume(event)
            case ev.Stored(policy):
                self._stored(policy)
            case ev.Unusable(policy) | ev.Forgotten(policy):
                self._forget(policy)
            case ev.Unwritable():
                self._shelve()
            case ev.Writable():
                self._unshelve()
            case _:
                assert_never(event)

    # What comes in: news

    def _heard(self, peer: PeerId, message: Message, gossip: bool) -> None:
        if not gossip and not self._peers.heard(peer):
            return
        if gossip and not isinstance(message, PolicyNews | RosterNews | Evidence):
            # Its author is not connected, and need not even have sent it: we must not talk to it.
            raise BadMessage("an announcement is a policy, a roster or evidence")
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
            case Credit() | Blame():
                if not self._origin.hear(peer, message, self._now):
                    self._convict(peer, "confirmed chunks that it was never given")
            case Ask() | Have() | Taken() | Skipped() | Want():
                self._holders_say(peer, message)
            case _:
                assert_never(message)

    def _holders_say(self, peer: PeerId, message: Ask | Have | Taken | Skipped | Want) -> None:
        """What peers say to each other about the chunks of a policy."""
        policy = self._policies.get(message.policy)
        if policy is None:
            if self._rumours.hear(peer, message):
                self._out.append(ev.Send(peer, Ask(message.policy, True)))
            return
        match message:
            case Ask(_, wants_index):
                self._answer_ask(peer, policy, wants_index)
            case Have() | Skipped():
                mask = mask_of(message.ranges)
                if mask & ~policy.full:
                    self._convict(peer, "has chunks that do not exist")
                elif isinstance(message, Skipped):
                    self._relay.take_over(peer, policy, message, self._now)
                else:
                    policy.holds(peer, mask, self._now)
                self._out += self._exchange.pull(policy, self._now)
            case Taken(_, ranges):
                if not policy.skips(peer, mask_of(ranges)):
                    self._convict(peer, "took chunks that do not exist")
            case Want(_, chunks):
                self._answer_want(peer, policy, chunks)

    def _policy_news(self, news: PolicyNews, gossip: bool) -> None:
        manifest = self._known.manifest_untrusted(news.manifest)
        if manifest is None:
            return
        evidence = self._known.file(manifest)
        if evidence is not None:
            self._halt(evidence)
            return
        policy = self._policies.get(manifest.digest)
        if policy is None and self._is_over(manifest):
            return
        index = policy.index if policy is not None else None
        if index is None and news.index:  # judged first: a wrong index must not make old news of a manifest
            index = decode_index_untrusted(news.index, manifest.anchor, manifest.size)
        if policy is None:
            is_news = manifest.digest not in self._shelf
            policy = self._adopt(manifest)
            if is_news and gossip and (policy is not None or manifest.digest in self._shelf):
                self._out.append(ev.PassOn())
            if policy is None:
                return
        if policy.index is None and index is not None:
            policy.index = index
            self._out.append(ev.Begin(manifest, policy.index))
        if (policy.eager and not policy.asks) or policy.index is None:
            self._out += self._exchange.inquire(policy, self._now)

    def _is_over(self, manifest: Manifest) -> bool:
        """Whether this version is not worth fetching (any more)."""
        stale = self.newest is not None and manifest.version <= self.newest.version
        return stale or self._rumours.is_over(manifest.digest)

    def _adopt(self, manifest: Manifest) -> Policy | None:
        """Start to fetch a version, if it is worth it and there is a disk to keep it."""
        if self._is_over(manifest):
            return None
        if self._is_full:
            self._put_on_shelf(manifest)
            return None
        policy = Policy(manifest, self._now, self._config.stall)
        roster = self._known.roster(manifest.trainer)
        policy.eager = roster is None or self._local not in roster.positions
        for peer in self._rumours.take_askers(manifest.digest):
            policy.listen(peer)
        self._policies[manifest.digest] = policy
        for fetch in surplus(p for p in self._policies.values() if not p.whole):
            self._abandon(fetch)
        return policy if manifest.digest in self._policies else None

    # A disk that refuses

    def _shelve(self) -> None:
        """The disk refused: stop fetching, and remember what to begin with when it takes data again."""
        self._is_full = True
        for policy in [p for p in self._policies.values() if not p.whole]:
            self._out += self._exchange.decline(policy)
            self._out.append(ev.Abandon(policy.manifest.digest))
            self._put_on_shelf(policy.manifest)
            self._drop(policy.manifest.digest)

    def _put_on_shelf(self, manifest: Manifest) -> None:
        self._shelf[manifest.digest] = manifest
        if len(self._shelf) > MAX_FETCHES:
            del self._shelf[min(self._shelf, key=lambda name: self._shelf[name].version)]

    def _unshelve(self) -> None:
        """Fetch what came while the disk refused: nobody pushes it any more."""
        shelf, self._shelf, self._is_full = self._shelf, {}, False
        for manifest in sorted(shelf.values(), key=lambda manifest: manifest.version):
            policy = self._adopt(manifest)
            if policy is not None:
                policy.eager = True
                self._out += self._exchange.inquire(policy, self._now)

    def _halt(self, evidence: Equivocation) -> None:
        trainer = evidence.trainer
        self._known.halted[trainer] = evidence
        message = Evidence(evidence.first.encode(), evidence.second.encode())
        for policy in [p for p in self._policies.values() if p.manifest.trainer == trainer and not p.whole]:
            self._abandon(policy)
        self._out += [ev.Halt(evidence), ev.Gossip(message)]
        self._out += [ev.Send(peer, message) for peer in self._peers.up]

    def _answer_hello(self, peer: PeerId, newest: int) -> None:
        policy = max(self._policies.values(), key=lambda p: p.manifest.version, default=None)
        if policy is None or policy.manifest.version <= newest:
            return
        if not self._peers.greet(peer, policy.manifest.version):
            return
        roster = self._known.roster(policy.manifest.trainer)
        if roster is not None:
            self._out.append(ev.Send(peer, RosterNews(roster.encode())))
        self._out.append(ev.Send(peer, news_of(policy, INLINE_INDEX)))

    def _answer_ask(self, peer: PeerId, policy: Policy, wants_index: bool) -> None:
        if not policy.serve(peer):
            return
        name = policy.manifest.digest
        policy.listen(peer)
        if wants_index and policy.index is not None and policy.serve_index(peer):
            self._relay.lane(peer).tell(name)
            self._out.append(ev.Push(peer, news_of(policy)))
        self._out += [ev.Send(peer, Have(name, ranges)) for ranges in ranges_of(policy.verified)]

    def _answer_want(self, peer: PeerId, policy: Policy, chunks: tuple[int, ...]) -> None:
        handout = self._relay.handouts.get(policy.manifest.digest)
        for chunk in chunks:
            if chunk >= policy.count:
                self._convict(peer, "wants a chunk that does not exist")
                return
            if handout is None or not handout.complain(chunk, peer, self._now):
                self._relay.serve(peer, policy, chunk)

    # What comes in: chunks

    def wants(self, peer: PeerId, header: ChunkHeader) -> int | None:
        """Bytes that this chunk must have; None if it is not wanted. Asked before it is read."""
        policy = self._policies.get(header.policy)
        if self._peers.is_liar(peer) or policy is None or policy.index is None:
            return None
        if header.index >= policy.count:
            return 0  # it cannot exist, as `handle` will say
        return None if policy.verified >> header.index & 1 else policy.index.chunks[header.index].wire

    def trusts(self, peer: PeerId, header: ChunkHeader) -> bool:
        """Whether a chunk from ``peer`` is no surprise: it was asked for, or the roster names ``peer``."""
        policy = self._policies.get(header.policy)
        if policy is None:
            return False
        request = policy.requests.get(header.index)
        roster = self._known.roster(policy.manifest.trainer)
        fed = roster is not None and peer in roster.positions
        return fed or peer == policy.manifest.trainer or (request is not None and request.peer == peer)

    def _chunk_skipped(self, peer: PeerId, header: ChunkHeader, size: int) -> None:
        policy = self._policies.get(header.policy)
        if not self._peers.heard(peer) or policy is None or not policy.verified >> header.index & 1:
            return  # of a version that was given up, or of nobody we deal with
        self.stats.duplicates += size
        if peer == policy.manifest.trainer:
            self._relay.forward(policy, header, peer, self._now)  # given again: its first root failed

    def _chunk_came(self, peer: PeerId, header: ChunkHeader, data: bytes) -> None:
        policy = self._policies.get(header.policy)
        if not self._peers.heard(peer) or policy is None or policy.index is None:
            return  # of a version that was given up, or of nobody we deal with
        if header.index >= policy.count:
            self._convict(peer, "sent a chunk that does not exist")
            return
        chunk, bit = policy.index.chunks[header.index], 1 << header.index
        if policy.verified & bit:  # since it was wanted
            self._chunk_skipped(peer, header, len(data))
            return
        request = policy.requests.get(header.index)
        asked = self._repair.came(policy, header.index, peer, self._now)
        if len(data) != chunk.wire or digest_of(data) != chunk.digest:
            policy.advance(header.index, ChunkEvent.DIGEST_BAD)
            self.stats.chunks_bad += 1
            self._convict(peer, "sent a chunk with a wrong digest")
            self._out.append(ev.Send(policy.manifest.trainer, Blame(header.policy, peer)))
            return
        policy.advance(header.index, ChunkEvent.DIGEST_OK)
        if request is not None and not asked:
            self._out += self._exchange.cancel(policy, {header.index: request.peer})
        policy.arrived(header.index, self._now, pushed=request is None and header.stripe != NO_STRIPE)
        self.stats.count_came(len(data), asked=asked, origin=peer == policy.manifest.trainer)
        policy.holds(peer, bit, self._now)
        self._out.append(ev.Keep(header.policy, header.index, data))
        self._relay.pass_on(policy, header, peer, self._now)
        policy.unsaid |= bit
        policy.speak(self._now)
        if policy.whole:
            self._out += self._exchange.say(policy)
            self._out.append(ev.Finish(header.policy))
        elif asked or policy.eager or policy.urgent:
            self._out += self._exchange.pull(policy, self._now)

    def _chunk_sent(self, peer: PeerId, size: int) -> None:
        policy = self._relay.sent(peer, self._now)
        self.stats.count_sent(size, origin=policy is not None and policy.manifest.trainer == self._local)

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
        self._drop(name)
        self._rumours.close(name)

    def _drop(self, name: bytes) -> None:
        policy = self._policies.pop(name, None)
        if policy is not None:
            self._repair.forget(policy)
        self._relay.forget(name)

    # Our own policies

    def _publish(self, event: ev.Publish) -> None:
        self._known.file(event.manifest)
        if event.roster is not None and self._known.add_roster(event.roster):
            self._out.append(ev.Gossip(RosterNews(event.roster.encode())))
        policy = self._hold(event.manifest, event.index)
        policy.stored = True
        self._advance_newest(event.manifest)
        self._origin.publish(policy, again=False)

    def _hold(self, manifest: Manifest, index: Index) -> Policy:
        policy = Policy(manifest, self._now, self._config.stall)
        policy.index = index
        policy.verified = policy.full
        self._policies[manifest.digest] = policy
        return policy

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
            self._origin.publish(policy, again=True)

    # Peers

    def _peer_up(self, peer: PeerId) -> None:
        self._peers.connected(peer)
        for policy in self._policies.values():
            if policy.manifest.trainer == peer and not policy.whole:
                policy.ask_at = self._now  # perhaps it is back, and has what nobody else has
        newest = max((p.manifest.version for p in self._policies.values()), default=NO_POLICY)
        self._out.append(ev.Send(peer, Hello(newest)))

    def _peer_lost(self, peer: PeerId) -> None:
        self._peers.lose(peer)
        self._repair.lose(peer)
        self._relay.lose(peer, self._now)
        for policy in self._policies.values():
            policy.lose(peer)
            self._out += self._exchange.pull(policy, self._now)

    def _convict(self, peer: PeerId, reason: str) -> None:
        """Never deal with ``peer`` again."""
        self._peers.convict(peer)
        self._peer_lost(peer)
        self._out.append(ev.Penalise(peer, reason))

    # What goes out

    def _flow(self) -> None:
        self._out += self._origin.start(self._now)
        self._relay.give(self._now)
        self._out += self._relay.pump(self._now)
        for policy in self._policies.values():
            self._out += self._relay.credit(policy)

    def _tick(self) -> None:
        self._origin.expire(self._now)
        for policy in list(self._policies.values()):
            if policy.say_at <= self._now:
                self._out += self._exchange.say(policy)
            if policy.whole:
                continue
            policy.ripen(self._now)
            self._out += self._exchange.cancel(policy, self._repair.expire(policy, self._now))
            if policy.ask_at <= self._now:
                self._out += self._exchange.inquire(policy, self._now)
            self._out += self._exchange.pull(policy, self._now)
