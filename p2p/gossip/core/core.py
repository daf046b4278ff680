"""`GossipCore`: libp2p's gossipsub v1.1 as a state machine, events and time in, effects out.

Theory of operation
-------------------
For each topic that the node subscribes to, a few peers form its mesh (`mesh`) and get each new
message at once; other subscribers are told ids in each heartbeat and ask for what they miss
(`message_cache`). A message is forwarded only after its signature was checked here and its
content was accepted by the node (`Validate`, then `Validated`, which brings it back: the core
keeps no message that waits).

A peer that sends what no honest peer sends is penalised: forged or rejected messages, malformed
RPCs, GRAFT during a backoff, floods, and broken promises, that is ids of messages that then do
not come (`promises`). The host keeps the score that disconnects. What a peer may cost us in a
second is bounded before anything is decoded (`quotas`).

A host may read what a peer sent a moment after its connection has ended. Such an RPC must not
leave anything here: nothing would remove it again, and the mesh would fill with peers that are
gone. So the core knows which peers are connected and drops the RPCs of others. Hosts tell of a
connection before its first message.

What is left out of v1.1: peer exchange in PRUNE (addresses come from membership), and the score
function with its dozens of parameters, of which `FirstDeliveries` keeps one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from random import Random
from typing import assert_never

from p2p.errors import BadMessage
from p2p.events import PeerDown, PeerUp, Penalise, Received, Send, Tick
from p2p.gossip import messages as msg
from p2p.gossip.config import BACKOFF, GossipConfig
from p2p.gossip.core import events as ev
from p2p.gossip.core.caches import MessageCache, SeenCache, size_of
from p2p.gossip.core.mesh import Mesh
from p2p.gossip.core.promises import FirstDeliveries, Promises
from p2p.gossip.core.quotas import FIELD_COST, IGNORED_COST, RPC_COST, VERIFY_COST, PeerQuotas
from p2p.identity import FOREIGN, PeerId, Signer, Verify
from p2p.offence import Offence
from p2p.own_time import STALL


class GossipCore:
    """State machine that publishes and subscribes for one node."""

    def __init__(
        self, signer: Signer, config: GossipConfig, rng: Random, *, verify: Verify, seqno: int
    ) -> None:
        """Set up the parts of the core. ``seqno`` must be higher than any used before under
        this key, such as the nanoseconds since 1970."""
        self.counters: Counter[str] = Counter()
        """Counts messages and RPCs by outcome."""
        self._signer = signer
        self._config = config
        self._rng = rng
        self._verify = verify
        self._seqno = seqno
        self._earned = FirstDeliveries()
        self._mesh = Mesh(config, rng, self._earned)
        self._quotas = PeerQuotas()
        self._promises = Promises(config)
        self._seen = SeenCache(8 * config.interval)  # a message must not outlast its id
        self._cache = MessageCache()
        self._out: defaultdict[PeerId, msg.Rpc] = defaultdict(msg.Rpc)
        """Maps each peer to the RPC that it is sent at the end of an event, unless it stays
        empty."""
        self._effects: list[ev.Effect] = []
        self.next_deadline = -math.inf
        """Time of the next `Tick`."""
        self._grace_until = -math.inf

    @property
    def topics(self) -> dict[str, tuple[PeerId, ...]]:
        """Maps each topic that the node subscribes to to its mesh peers."""
        return {topic: tuple(mesh) for topic, mesh in self._mesh.meshes.items()}

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Advance by one event and return what to do about it."""
        if -math.inf < self.next_deadline < now - STALL:
            # Seconds after a stall in which no flood and no broken promise is penalised: what
            # peers sent meanwhile comes at once, and the messages that they advertised are gone
            # from their caches.
            self._grace_until = now + 10.0
        match event:
            case Received(peer, data):
                self._on_rpc(peer, data, now)
            case PeerUp(peer, dialled):
                self._mesh.connected(peer, dialled)
                self._quotas.connected(peer, now)
                ours = [(topic, True) for topic in self._mesh.meshes]
                self._out[peer].subscriptions.extend(ours)
            case PeerDown(peer, unreachable):
                if not unreachable:
                    self._mesh.disconnected(peer)
                    self._earned.disconnected(peer)
                    self._promises.disconnected(peer)
                    self._quotas.disconnected(peer)
            case ev.Subscribe(topic):
                if topic not in self._mesh.meshes:
                    self._announce_subscription(topic, True)
                    for peer in self._mesh.join(topic, now):
                        self._out[peer].graft.append(topic)
            case ev.Unsubscribe(topic):
                if topic in self._mesh.meshes:
                    for peer in self._mesh.leave(topic, now):
                        self._out[peer].prune.append((topic, round(BACKOFF)))
                    self._announce_subscription(topic, False)
            case ev.Publish(topic, data):
                self._publish(topic, data, now)
            case ev.Validated(asked, validity):
                self._on_validated(asked, validity, now)
            case Tick():
                self._heartbeat(now)
            case _:
                assert_never(event)
        return self._take_effects()

    # What the node wants.

    def _announce_subscription(self, topic: str, subscribed: bool) -> None:
        for peer in self._mesh.topics_of:
            self._out[peer].subscriptions.append((topic, subscribed))

    def _publish(self, topic: str, data: bytes, now: float) -> None:
        self._seqno += 1
        message = msg.sign_message(self._signer, topic, data, self._seqno)
        self._seen.accept(message.id, now)
        self._cache.put(message)
        for peer in self._mesh.publish_recipients(topic, size_of(message)):
            self._out[peer].messages.append(message)
        self.counters["published"] += 1

    def _on_validated(self, asked: ev.Validate, validity: ev.Validity, now: float) -> None:
        message, author, source = asked.message, asked.author, asked.source
        if validity is ev.Validity.ACCEPT:
            # Deliver it here, and send it to the mesh but for its author and the peer it came
            # from.
            self._seen.accept(message.id, now)
            self._cache.put(message)
            if self._mesh.is_connected(source):
                self._earned.delivered_first(source)
            cost = RPC_COST + VERIFY_COST + size_of(message)
            self._quotas.authors.charge(author, now, cost)
            self._effects.append(ev.Deliver(message.topic, author, message.data or b""))
            for peer in self._mesh.meshes.get(message.topic, {}):
                if peer not in (source, author):
                    self._out[peer].messages.append(message)
        elif validity is ev.Validity.IGNORE:
            self._quotas.charge(source, IGNORED_COST)
        else:
            self._seen.reject(message.id)
            self._penalise(source, Offence.REJECTED, "rejected")
        self.counters[validity.value] += 1

    # What peers send.

    def _on_rpc(self, peer: PeerId, data: bytes, now: float) -> None:
        if not self._mesh.is_connected(peer):
            self.counters["not connected"] += 1
            return
        if not self._quotas.admit(peer, len(data), now):
            self.counters["over quota"] += 1
            if self._quotas.take_flood(peer) and now >= self._grace_until:
                self._penalise(peer, Offence.FLOOD, "flood")
            return
        try:
            rpc = msg.decode_rpc_untrusted(data)
        except BadMessage as error:
            self._penalise(peer, Offence.MALFORMED, "malformed", str(error))
            return
        self._quotas.charge(peer, rpc.fields * FIELD_COST)
        for topic, subscribed in rpc.subscriptions:
            if not self._mesh.set_subscribed(peer, topic, subscribed):
                self.counters["too many topics"] += 1
        for message in rpc.messages:
            if not self._on_message(peer, message, now):
                return
            self._promises.fulfilled(message.id)
        for topic in dict.fromkeys(rpc.graft):
            self._on_graft(peer, topic, now)
        for topic, backoff in rpc.prune:
            self._mesh.prune(topic, peer, now, max(backoff, BACKOFF))
        self._on_ihave(peer, rpc, now)
        self._on_iwant(peer, rpc.iwant)

    def _on_message(self, peer: PeerId, message: msg.PubsubMessage, now: float) -> bool:
        """Process a message. Return False if it is forged, and the rest of its RPC is to be
        skipped."""
        identity = message.id
        if message.topic not in self._mesh.meshes:
            self.counters["not ours"] += 1
        elif identity in self._seen:
            self.counters["duplicate"] += 1
            if self._seen.is_rejected(identity):
                self._penalise(peer, Offence.REJECTED, "rejected")
        elif message.author == self._signer.peer_id.digest:
            self.counters["echo"] += 1  # published before this process was restarted
        else:
            return self._check_signature(peer, message, now)
        return True

    def _check_signature(self, peer: PeerId, message: msg.PubsubMessage, now: float) -> bool:
        """Pass a message to its validator if the signature is good. Return False if it is
        forged.

        Only a message with a good signature counts as seen, so that a forgery cannot block the
        message that it imitates. The first forgery ends an RPC: its sender did not check what
        follows either, or can send it again.
        """
        author = msg.author_of(message)
        if author is None:
            self.counters["foreign key"] += 1
            return True
        self._quotas.charge(peer, VERIFY_COST)
        signed = msg.SIGNATURE_PREFIX + message.unsigned()
        if not self._verify(author, FOREIGN, signed, message.signature):
            self._penalise(peer, Offence.FORGED, "forged")
            return False
        self._seen.add(message.id, peer, now)
        if self._quotas.authors.level(author, now) <= 0:
            self.counters["author over quota"] += 1
            return True
        self._effects.append(ev.Validate(message, author, peer))
        return True

    def _on_graft(self, peer: PeerId, topic: str, now: float) -> None:
        """Handle a GRAFT: add the peer to our mesh too, or answer with PRUNE."""
        mesh = self._mesh.meshes.get(topic)
        if mesh is None or peer in mesh:
            return
        if self._mesh.is_backed_off(topic, peer, now):
            self._penalise(peer, Offence.GRAFT, "graft in backoff")
        elif self._mesh.has_place_for(topic, peer) and self._mesh.set_subscribed(
            peer, topic, True
        ):
            mesh[peer] = None
            return
        self._mesh.add_backoff(topic, peer, now, BACKOFF)
        self._out[peer].prune.append((topic, round(BACKOFF)))

    def _on_ihave(self, peer: PeerId, rpc: msg.Rpc, now: float) -> None:
        """Handle IHAVE: request ids that we have not seen."""
        if not rpc.ihave:
            return
        promises, proven = self._promises, self._earned.has_delivered(peer)
        wanted = dict.fromkeys(
            identity
            for topic, ids in rpc.ihave
            if topic in self._mesh.meshes
            for identity in ids
            if identity not in self._seen
            if promises.should_ask(identity, peer, now, proven=proven)
        )
        asked = [each for each in wanted if promises.ask(each, peer, now, proven=proven)]
        self._out[peer].iwant.extend(asked)

    def _on_iwant(self, peer: PeerId, ids: list[bytes]) -> None:
        """Send the messages that a peer requests, charged to its quota. An id of 48 bytes may
        request 256 KiB."""
        size = 0
        for identity in ids:
            message = self._cache.get(identity)
            if message is not None:
                size += size_of(message)
                answer = self._out[peer].messages
                # The host's outbox holds eight answers of half an RPC.
                if size > msg.MAX_RPC // 2 or len(answer) >= msg.MAX_ENTRIES:
                    return
                self._quotas.charge(peer, size_of(message))
                answer.append(message)

    # The heartbeat.

    def _heartbeat(self, now: float) -> None:
        if now < self.next_deadline:
            return
        self.next_deadline = now + self._config.interval
        for peer in self._promises.heartbeat(now):
            if now >= self._grace_until:
                self._penalise(peer, Offence.BROKEN_PROMISE, "broken promise")
        for peer in self._quotas.heartbeat():
            if now >= self._grace_until:
                self._penalise(peer, Offence.FLOOD, "flood")
        self._earned.heartbeat()
        self._seen.expire(now)
        self._mesh.heartbeat(now)
        for topic in self._mesh.meshes:
            grafted, pruned = self._mesh.maintain(topic, now)
            for peer in grafted:
                self._out[peer].graft.append(topic)
            for peer in pruned:
                self._out[peer].prune.append((topic, round(BACKOFF)))
        self._emit_gossip()
        self._cache.shift()

    def _emit_gossip(self) -> None:
        """Send IHAVE to some peers outside the mesh."""
        advertised: Counter[PeerId] = Counter()
        for topic in self._cache.topics:
            # Ids advertised to one peer in a heartbeat and topic, the newest: 46 KB, and twice
            # what a peer of ours asks for (`promises.MAX_OWED`).
            ids = self._cache.gossip_ids(topic)[-1000:]
            if not ids:
                continue
            for peer in self._mesh.gossip_recipients(topic):
                if advertised[peer] + len(ids) <= msg.MAX_IDS:
                    advertised[peer] += len(ids)
                    self._out[peer].ihave.append((topic, ids))

    # Shared steps.

    def _take_effects(self) -> list[ev.Effect]:
        encoded = [(peer, msg.encode_rpc(rpc)) for peer, rpc in self._out.items()]
        self._out.clear()
        effects, self._effects = self._effects, []
        return [*effects, *(Send(peer, data) for peer, data in encoded if data)]

    def _penalise(self, peer: PeerId, offence: Offence, reason: str, detail: str = "") -> None:
        """Count an offence, and tell the host."""
        self.counters[reason] += 1
        said = f"{reason}: {detail}" if detail else reason
        self._effects.append(Penalise(peer, offence, said))
