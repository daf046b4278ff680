"""Topics over a mesh: libp2p's gossipsub v1.1 as a state machine, events and time in, effects out.

Theory of operation
-------------------
For each topic that we hear, a few peers form our mesh (`mesh`) and get each new message at once; other
hearers are told ids each interval and ask for what they miss (`cache`). A message is passed on only after
its signature was checked here and its content was accepted by the node (`Validate`, then `Validated`).

A peer that sends what no honest peer sends is penalised: forged or rejected messages, malformed RPCs, grafts
during a backoff, floods, and ids of messages that then do not come (a broken promise). The host keeps the
real score; here demerits, which fade, keep such a peer out of the mesh and in the end make us deaf to its
ids. What a peer may cost us in a second is bounded before anything is decoded (`manners`).

A host reads what a peer sent before its connection ended a moment after it ended. Such a message may not
leave anything here: nothing would remove it again, and the mesh would fill with ghosts. So the core knows who
is connected, and drops what others say. Hosts tell of a connection before its first message.

What is left out of v1.1: peer exchange in prunes (addresses come from membership), and the score function
with its dozens of parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Final, assert_never

from p2p.errors import BadMessage
from p2p.gossip.core.cache import MessageCache, SeenCache, size_of
from p2p.gossip.core.events import (
    Connected,
    Deliver,
    Disconnected,
    Effect,
    Event,
    GossipConfig,
    Penalise,
    Publish,
    Received,
    Send,
    Subscribe,
    Tick,
    Unsubscribe,
    Validate,
    Validated,
    Validity,
)
from p2p.gossip.core.mesh import MAX_TOPICS_OF_PEER, Mesh
from p2p.gossip.core.peer_scores import (
    BROKEN_PROMISE_POINTS,
    FIELD_COST,
    FLOOD_POINTS,
    FORGED_POINTS,
    GRAFT_POINTS,
    IGNORED_COST,
    MALFORMED_POINTS,
    REJECTED_POINTS,
    VERIFY_COST,
    Manners,
)
from p2p.gossip.messages import (
    MAX_DATA,
    MAX_IDS,
    MAX_MESSAGES,
    MAX_RPC,
    MAX_TOPIC,
    SIGNATURE_PREFIX,
    PubsubMessage,
    Rpc,
    author_of,
    decode_rpc_untrusted,
    encode_rpc,
    sign_message,
)
from p2p.identity import FOREIGN, PeerId, Signer, Verify

MAX_PENDING: Final = 1024
"""Messages that wait for their validator; beyond it new ones are dropped, unseen, to come again."""
PENDING_TIMEOUT: Final = 10.0
"""Seconds after which a message is not waited for: its validator has crashed. Without it 1,024 such messages
would make us deaf for good."""
MAX_ANSWER: Final = MAX_RPC // 2
"""Bytes of messages in one answer to IWANT: the host's outbox holds eight of them."""
JUMP: Final = 3.0
"""Seconds that `Tick` is late from which we take it that this process was stopped, or its machine asleep."""
EXCUSE: Final = 10.0
"""Seconds after such a jump in which floods and broken promises are held against no peer: what they sent
meanwhile comes at once, and the messages that they told us of are gone from their caches."""
MAX_TOLD: Final = 1000
"""Ids told to one peer in an interval and topic: the newest."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A message that its validator is looking at."""

    message: PubsubMessage
    author: PeerId
    source: PeerId
    since: float


class GossipCore:
    """Publish and subscribe for one node. Feed it `Event`s, carry out its `Effect`s."""

    def __init__(
        self, signer: Signer, config: GossipConfig, rng: Random, *, verify: Verify, seqno: int
    ) -> None:
        """``seqno`` must be higher than any used before under this key; nanoseconds since 1970 do."""
        self.counters: Counter[str] = Counter()
        """Messages by what became of them."""
        self._signer = signer
        self._config = config
        self._rng = rng
        self._verify = verify
        self._seqno = seqno
        self._mesh = Mesh(config, rng)
        self._manners = Manners(config)
        self._seen = SeenCache(config.seen)
        self._cache = MessageCache(config.history, config.history_gossip)
        self._pending: dict[bytes, _Pending] = {}
        self._out: dict[PeerId, Rpc] = {}
        self._effects: list[Effect] = []
        self._next_tick = -math.inf
        self._excused_until = -math.inf

    @property
    def next_deadline(self) -> float:
        """When to deliver the next `Tick`."""
        return self._next_tick

    @property
    def topics(self) -> dict[str, tuple[PeerId, ...]]:
        """The topics we hear, each with its mesh."""
        return {topic: tuple(mesh) for topic, mesh in self._mesh.meshes.items()}

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Advance by one event and return what to do about it. Raises `ValueError` if what we are to
        say or hear is too long."""
        if -math.inf < self._next_tick < now - JUMP:
            self._excused_until = now + EXCUSE
        match event:
            case Received(peer, data):
                self._receive(peer, data, now)
            case Connected(peer, dialled):
                self._mesh.connected(peer, dialled)
                self._manners.connected(peer, now)
                self._to(peer).subscriptions += [(topic, True) for topic in self._mesh.meshes]
            case Disconnected(peer):
                self._mesh.disconnected(peer)
                self._manners.disconnected(peer)
            case Subscribe(topic):
                self._subscribe(topic, now)
            case Unsubscribe(topic):
                self._unsubscribe(topic, now)
            case Publish(topic, data):
                self._publish(topic, data, now)
            case Validated(identity, validity):
                self._validated(identity, validity, now)
            case Tick():
                self._tick(now)
            case _:
                assert_never(event)
        return self._take_effects()

    # The node.

    def _subscribe(self, topic: str, now: float) -> None:
        _check_topic(topic)
        if topic in self._mesh.meshes:
            return
        if len(self._mesh.meshes) >= MAX_TOPICS_OF_PEER:
            raise ValueError(f"a node hears at most {MAX_TOPICS_OF_PEER} topics: peers remember no more")
        self._say_subscribed(topic, True)
        for peer in self._mesh.subscribe(topic, now, self._manners.is_good):
            self._to(peer).graft.append(topic)

    def _unsubscribe(self, topic: str, now: float) -> None:
        if topic not in self._mesh.meshes:
            return
        for peer in self._mesh.unsubscribe(topic, now):
            self._to(peer).prune.append((topic, round(self._config.backoff)))
        self._say_subscribed(topic, False)

    def _say_subscribed(self, topic: str, wanted: bool) -> None:
        for peer in self._mesh.connected_peers():
            self._to(peer).subscriptions.append((topic, wanted))

    def _publish(self, topic: str, data: bytes, now: float) -> None:
        _check_topic(topic)
        if len(data) > MAX_DATA:
            raise ValueError(f"a message carries at most {MAX_DATA} bytes, not {len(data)}")
        self._seqno += 1
        message = sign_message(self._signer, topic, data, self._seqno)
        self._seen.accept(message.id, now)
        self._cache.put(message)
        good, credit = self._manners.is_good, self._manners.credit
        for peer in self._mesh.audience(topic, size_of(message), now, good, credit):
            self._to(peer).messages.append(message)
        self.counters["published"] += 1

    def _validated(self, identity: bytes, validity: Validity, now: float) -> None:
        pending = self._pending.pop(identity, None)
        if pending is None:
            return
        message, source = pending.message, pending.source
        if validity is Validity.ACCEPT:
            self._accepted(pending, now)
        elif validity is Validity.IGNORE:
            self._manners.charge(source, IGNORED_COST)
        else:
            self._seen.condemn(message.id)
            self._blame(source, REJECTED_POINTS, "rejected")
        self.counters[validity.value] += 1

    def _accepted(self, pending: _Pending, now: float) -> None:
        """Deliver it and pass it on."""
        message, author, source = pending.message, pending.author, pending.source
        self._seen.accept(message.id, now)
        self._cache.put(message)
        self._manners.earn(source)
        self._manners.charge_author(author, size_of(message), now)
        self._effects.append(Deliver(message.topic, author, message.data or b""))
        for peer in self._mesh.meshes.get(message.topic, {}):
            if peer not in (source, author):
                self._to(peer).messages.append(message)

    # The peers.

    def _receive(self, peer: PeerId, data: bytes, now: float) -> None:
        if not self._mesh.is_connected(peer):
            self.counters["not connected"] += 1
            return
        if not self._manners.may_send(peer, len(data), now):
            self._over_quota(peer, now)
            return
        try:
            rpc = decode_rpc_untrusted(data)
        except BadMessage as error:
            self._blame(peer, MALFORMED_POINTS, "malformed", str(error))
            return
        self._manners.charge(peer, rpc.fields * FIELD_COST)
        for topic, wanted in rpc.subscriptions:
            if not self._mesh.heard_by(peer, topic, wanted):
                self.counters["too many topics"] += 1
        for message in rpc.messages:
            if not self._message(peer, message, now):
                return
            self._manners.kept(message.id)
        for topic in dict.fromkeys(rpc.graft):
            self._grafted(peer, topic, now)
        for topic, backoff in rpc.prune:
            self._mesh.prune(topic, peer, now, max(backoff, self._config.backoff))
        self._told(peer, rpc, now)
        self._asked(peer, rpc.iwant)

    def _over_quota(self, peer: PeerId, now: float) -> None:
        """An RPC was dropped unread. Only a peer that goes on and on is blamed."""
        self.counters["over quota"] += 1
        if self._manners.is_flooding(peer) and now >= self._excused_until:
            self._blame(peer, FLOOD_POINTS, "flood")

    def _message(self, peer: PeerId, message: PubsubMessage, now: float) -> bool:
        """Take a message; False if it is forged, and the rest of its RPC not worth reading."""
        identity = message.id
        if message.topic not in self._mesh.meshes:
            self.counters["not ours"] += 1
        elif identity in self._seen:
            self.counters["duplicate"] += 1
            if self._seen.is_lie(identity):
                self._blame(peer, REJECTED_POINTS, "rejected")
        elif message.author == self._signer.peer_id.digest:
            self.counters["echo"] += 1  # of an earlier life
        elif len(self._pending) >= MAX_PENDING:
            self.counters["too many pending"] += 1
        else:
            return self._judge(peer, message, now)
        return True

    def _judge(self, peer: PeerId, message: PubsubMessage, now: float) -> bool:
        """Check the signature; only then is the id seen, so that a forgery cannot block what it imitates.

        The first forgery ends an RPC: its sender signed none of what follows either, or can send it again.
        """
        author = author_of(message)
        if author is None:
            self.counters["foreign key"] += 1
            return True
        if self._manners.is_overdrawn(peer):
            self.counters["unverified"] += 1
            return True
        self._manners.charge(peer, VERIFY_COST)
        signed = SIGNATURE_PREFIX + message.unsigned()
        if not self._verify(author, FOREIGN, signed, message.signature):
            self._blame(peer, FORGED_POINTS, "forged")
            return False
        self._seen.add(message.id, peer, now)
        if not self._manners.author_may(author, now):
            self.counters["author over quota"] += 1
            return True
        self._pending[message.id] = _Pending(message, author, peer, now)
        self._effects.append(Validate(message.id, message.topic, author, message.data or b""))
        return True

    def _grafted(self, peer: PeerId, topic: str, now: float) -> None:
        mesh = self._mesh.meshes.get(topic)
        if mesh is None or peer in mesh:
            return
        backoff = self._config.backoff
        if self._mesh.is_backed_off(topic, peer, now):
            self._blame(peer, GRAFT_POINTS, "graft in backoff")
        elif (
            self._manners.is_good(peer)
            and self._mesh.has_seat(topic, peer)
            and self._mesh.heard_by(peer, topic, True)
        ):
            self._mesh.graft(topic, peer)
            return
        self._mesh.back_off(topic, peer, now, backoff)
        self._to(peer).prune.append((topic, round(backoff)))

    def _told(self, peer: PeerId, rpc: Rpc, now: float) -> None:
        """Ids that a peer has: ask for those we have not."""
        if not rpc.ihave or not self._manners.is_credible(peer):
            return
        allowed = self._manners.may_ask(peer)
        if allowed <= 0:
            return
        wanted = dict.fromkeys(
            identity
            for topic, ids in rpc.ihave
            if topic in self._mesh.meshes
            for identity in ids
            if identity not in self._seen and self._manners.should_ask(identity, peer, now)
        )
        chosen = self._rng.sample(list(wanted), min(allowed, len(wanted)))
        self._to(peer).iwant += [each for each in chosen if self._manners.ask(each, peer, now)]

    def _asked(self, peer: PeerId, ids: list[bytes]) -> None:
        """Answer, on the peer's account: an id of 48 bytes may ask for 256 KiB."""
        size = 0
        for identity in ids if self._manners.is_credible(peer) else ():
            if self._manners.is_overdrawn(peer):
                self.counters["answers over quota"] += 1
                return
            message = self._cache.take(identity, peer)
            if message is not None:
                size += size_of(message)
                answer = self._to(peer).messages
                if size > MAX_ANSWER or len(answer) >= MAX_MESSAGES:
                    return
                self._manners.charge(peer, size_of(message))
                answer.append(message)

    # The clock.

    def _tick(self, now: float) -> None:
        if now < self._next_tick:
            return
        self._next_tick = now + self._config.interval
        for peer in self._manners.broken_promises(now):
            if now >= self._excused_until:
                self._blame(peer, BROKEN_PROMISE_POINTS, "broken promise")
        for peer in self._manners.persistent():
            if now >= self._excused_until:
                self._blame(peer, FLOOD_POINTS, "flood")
        self._manners.fade()
        self._seen.expire(now)
        self._mesh.expire(now)
        self._forget_pending(now)
        self._mesh.look()
        manners = self._manners
        for topic in self._mesh.meshes:
            grafted, pruned = self._mesh.maintain(topic, now, manners.is_good, manners.score, manners.credit)
            for peer in grafted:
                self._to(peer).graft.append(topic)
            for peer in pruned:
                self._to(peer).prune.append((topic, round(self._config.backoff)))
        self._tell_ids()
        self._cache.shift()

    def _forget_pending(self, now: float) -> None:
        late = [each for each, pending in self._pending.items() if pending.since <= now - PENDING_TIMEOUT]
        for identity in late:
            del self._pending[identity]

    def _tell_ids(self) -> None:
        """Tell some peers outside the mesh what could be asked for."""
        told: Counter[PeerId] = Counter()
        for topic in [*self._mesh.meshes, *self._mesh.fanout_topics()]:
            ids = self._cache.ids(topic)[-MAX_TOLD:]
            for peer in self._mesh.gossip_to(topic, self._manners.is_good) if ids else ():
                if told[peer] + len(ids) <= MAX_IDS:
                    told[peer] += len(ids)
                    self._to(peer).ihave.append((topic, ids))

    # Shared steps.

    def _to(self, peer: PeerId) -> Rpc:
        """What ``peer`` will be sent at the end of this event."""
        rpc = self._out.get(peer)
        if rpc is None:
            rpc = self._out[peer] = Rpc()
        return rpc

    def _take_effects(self) -> list[Effect]:
        for peer, rpc in self._out.items():
            data = encode_rpc(rpc)
            if data:
                self._effects.append(Send(peer, data))
        self._out = {}
        effects, self._effects = self._effects, []
        return effects

    def _blame(self, peer: PeerId, points: float, reason: str, detail: str = "") -> None:
        self.counters[reason] += 1
        self._manners.blame(peer, points)
        self._effects.append(Penalise(peer, points, f"{reason}: {detail}" if detail else reason))


def _check_topic(topic: str) -> None:
    if not 0 < len(topic.encode()) <= MAX_TOPIC:
        raise ValueError(f"a topic has 1 to {MAX_TOPIC} bytes")
