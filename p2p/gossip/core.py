"""Topics over a mesh: libp2p's gossipsub v1.1 as a state machine, events and time in, effects out.

Theory of operation
-------------------
For each topic that we hear, a few peers form our mesh (`mesh`) and get each new message at once; other
hearers are told ids each interval and ask for what they miss (`cache`). A message is passed on only after
its signature was checked here and its content was accepted by the node (`Validate`, then `Validated`).

Who sends what no honest peer sends is penalised: forged or rejected messages, malformed RPCs, grafts
during a backoff, floods, and ids of messages that then do not come (a broken promise). The host keeps the
real score; here demerits, which fade, keep such a peer out of the mesh and in the end make us deaf to its
ids.

What is left out of v1.1: peer exchange in prunes (addresses come from membership), and the score function
with its dozens of parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Final, assert_never

from p2p.errors import BadMessage
from p2p.gossip.cache import MessageCache, SeenCache
from p2p.gossip.events import (
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
from p2p.gossip.manners import (
    BROKEN_PROMISE_POINTS,
    FLOOD_POINTS,
    FORGED_POINTS,
    GRAFT_POINTS,
    MALFORMED_POINTS,
    REJECTED_POINTS,
    Manners,
)
from p2p.gossip.mesh import Mesh
from p2p.gossip.messages import (
    MAX_DATA,
    MAX_IDS,
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
MAX_ANSWER: Final = MAX_RPC // 2
"""Bytes of messages in one answer to IWANT: the host's outbox holds eight of them."""
MAX_TOLD: Final = 1000
"""Ids told to one peer in an interval and topic: the newest."""


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
        self._pending: dict[bytes, tuple[PubsubMessage, PeerId, PeerId]] = {}
        self._out: dict[PeerId, Rpc] = {}
        self._effects: list[Effect] = []
        self._next_tick = -math.inf

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
        match event:
            case Received(peer, data):
                self._receive(peer, data, now)
            case Connected(peer):
                self._mesh.connected(peer)
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
        self._seen.add(message.id, now)
        self._cache.put(message)
        for peer in self._mesh.audience(topic, now, self._manners.is_good):
            self._to(peer).messages.append(message)
        self.counters["published"] += 1

    def _validated(self, identity: bytes, validity: Validity, now: float) -> None:
        pending = self._pending.pop(identity, None)
        if pending is None:
            return
        message, author, source = pending
        if validity is Validity.ACCEPT:
            self._cache.put(message)
            self._effects.append(Deliver(message.topic, author, message.data or b""))
            for peer in self._mesh.meshes.get(message.topic, {}):
                if peer not in (source, author):
                    self._to(peer).messages.append(message)
        elif validity is Validity.REJECT:
            self._seen.condemn(identity)
            self._blame(source, REJECTED_POINTS, "rejected")
        self.counters[validity.value] += 1

    # The peers.

    def _receive(self, peer: PeerId, data: bytes, now: float) -> None:
        if not self._manners.may_send(peer, len(data), now):
            self._blame(peer, FLOOD_POINTS, "flood")
            return
        try:
            rpc = decode_rpc_untrusted(data)
        except BadMessage as error:
            self._blame(peer, MALFORMED_POINTS, "malformed", str(error))
            return
        for topic, wanted in rpc.subscriptions:
            if not self._mesh.heard_by(peer, topic, wanted):
                self.counters["too many topics"] += 1
        for message in rpc.messages:
            self._message(peer, message, now)
        for topic in rpc.graft:
            self._grafted(peer, topic, now)
        for topic, backoff in rpc.prune:
            self._mesh.prune(topic, peer, now, max(backoff, self._config.backoff))
        self._told(peer, rpc, now)
        self._asked(peer, rpc.iwant)

    def _message(self, peer: PeerId, message: PubsubMessage, now: float) -> None:
        identity = message.id
        self._manners.kept(identity)
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
            self._judge(peer, message, now)

    def _judge(self, peer: PeerId, message: PubsubMessage, now: float) -> None:
        """Check the signature; only then is the id seen, so that a forgery cannot block what it imitates."""
        author = author_of(message)
        signed = SIGNATURE_PREFIX + message.unsigned()
        if author is None:
            self.counters["foreign key"] += 1
        elif not self._verify(author, FOREIGN, signed, message.signature):
            self._blame(peer, FORGED_POINTS, "forged")
        else:
            self._seen.add(message.id, now)
            self._pending[message.id] = (message, author, peer)
            self._effects.append(Validate(message.id, message.topic, author, message.data or b""))

    def _grafted(self, peer: PeerId, topic: str, now: float) -> None:
        mesh = self._mesh.meshes.get(topic)
        if mesh is None or peer in mesh:
            return
        backoff = self._config.backoff
        if self._mesh.is_backed_off(topic, peer, now):
            self._blame(peer, GRAFT_POINTS, "graft in backoff")
        elif (
            self._manners.is_good(peer)
            and len(mesh) < self._config.high
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
        wanted = dict.fromkeys(
            identity
            for topic, ids in rpc.ihave
            if topic in self._mesh.meshes
            for identity in ids
            if identity not in self._seen and not self._manners.is_promised(identity)
        )
        allowed = self._manners.may_ask(peer, len(wanted))
        chosen = self._rng.sample(list(wanted), allowed)
        for identity in chosen:
            self._manners.promised(identity, peer, now)
        self._to(peer).iwant += chosen

    def _asked(self, peer: PeerId, ids: list[bytes]) -> None:
        size = 0
        for identity in ids if self._manners.is_credible(peer) else ():
            message = self._cache.take(identity, peer)
            if message is not None:
                size += len(message.data or b"")
                if size > MAX_ANSWER:
                    return
                self._to(peer).messages.append(message)

    # The clock.

    def _tick(self, now: float) -> None:
        if now < self._next_tick:
            return
        self._next_tick = now + self._config.interval
        for peer in self._manners.broken_promises(now):
            self._blame(peer, BROKEN_PROMISE_POINTS, "broken promise")
        self._manners.fade()
        self._seen.expire(now)
        self._mesh.expire(now)
        is_good, score = self._manners.is_good, self._manners.score
        for topic in self._mesh.meshes:
            grafted, pruned = self._mesh.maintain(topic, now, is_good, score)
            for peer in grafted:
                self._to(peer).graft.append(topic)
            for peer in pruned:
                self._to(peer).prune.append((topic, round(self._config.backoff)))
        self._tell_ids()
        self._cache.shift()

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
