"""The driver of `GossipCore`: the host's events in, its effects carried out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from p2p.errors import BadMessage
from p2p.gossip.config import GossipConfig
from p2p.gossip.core.core import GossipCore
from p2p.gossip.core.events import (
    Connected,
    Deliver,
    Disconnected,
    Effect,
    Event,
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
from p2p.gossip.messages import MAX_RPC, PROTOCOL_ID
from p2p.host import Host, PeerEvent, PeerState
from p2p.identity import PeerId
from p2p.world import Timer, World, lateness

Validator = Callable[[PeerId, bytes], Validity]
"""Says whether a message is accepted, by its author and data. It is called on the event loop
and must not block. If it raises `BadMessage`, that counts as `REJECT`."""
Handler = Callable[[PeerId, bytes], None]
"""Takes an accepted message, by its author and data. It is called on the event loop and must
not block."""


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Subscription:
    validate: Validator
    deliver: Handler


class Gossip:
    """Publish and subscribe. Open it with `open_gossip`."""

    def __init__(self, world: World, host: Host, core: GossipCore) -> None:
        self._world = world
        self._host = host
        self._core = core
        self._subscriptions: dict[str, _Subscription] = {}
        self._timer: Timer | None = None

    def subscribe(self, topic: str, validate: Validator, deliver: Handler) -> None:
        """Subscribe to ``topic``: what ``validate`` accepts is given to ``deliver`` once, and
        forwarded.

        A message can come again when its id has left the seen cache after two minutes, so a
        validator answers `IGNORE` to a version that it has had. Raises `ValueError` if the
        topic's name is empty or longer than 128 bytes, or if this node subscribes to 64 topics
        already.
        """
        self._drive(Subscribe(topic))
        self._subscriptions[topic] = _Subscription(validate, deliver)

    def unsubscribe(self, topic: str) -> None:
        """Leave ``topic``; nothing if it was not subscribed to."""
        self._subscriptions.pop(topic, None)
        self._drive(Unsubscribe(topic))

    def publish(self, topic: str, data: bytes) -> None:
        """Send ``data`` to the subscribers of ``topic``, but not to this node's own handler.
        Subscribing is not needed.

        Raises `ValueError` if ``data`` is larger than 256 KiB or the topic's name too long.
        """
        self._drive(Publish(topic, data))

    @property
    def topics(self) -> Mapping[str, tuple[PeerId, ...]]:
        """The topics that this node subscribes to, each with the peers of its mesh."""
        return self._core.topics

    @property
    def counters(self) -> Mapping[str, int]:
        """Messages and RPCs by what became of them."""
        return self._core.counters

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Take messages, watch connections and keep the heartbeat for the length of the
        block."""
        host, take, watch = self._host, self._on_message, self._on_peer
        with host.receiving(PROTOCOL_ID, take, max_message=MAX_RPC), host.watching(watch):
            for peer in host.connected:
                self._drive(Connected(peer))
            self._on_timer()
            try:
                yield
            finally:
                if self._timer is not None:
                    self._timer.cancel()

    def _on_message(self, peer: PeerId, data: bytes) -> None:
        self._drive(Received(peer, data))

    def _on_peer(self, event: PeerEvent) -> None:
        if event.state is PeerState.CONNECTED:
            self._drive(Connected(event.peer, event.dialled))
        elif event.state is PeerState.DISCONNECTED:
            self._drive(Disconnected(event.peer))

    def _on_timer(self) -> None:
        self._drive(Tick())
        self._world.sometimes("gossip/heard it twice", self._core.counters["duplicate"] > 0)
        due = max(self._core.next_deadline, self._world.now())
        when = due + lateness(self._world, "gossip/late heartbeat")
        self._timer = self._world.call_at(when, self._on_timer)

    def _drive(self, event: Event) -> None:
        for effect in self._core.handle(event, self._world.now()):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(peer, data):
                self._host.send(peer, PROTOCOL_ID, data)
            case Validate(identity, topic, author, data):
                self._validate(identity, topic, author, data)
            case Deliver(topic, author, data):
                self._world.trace("gossip.deliver", topic=topic, author=author)
                subscription = self._subscriptions.get(topic)
                if subscription is not None:
                    subscription.deliver(author, data)
            case Penalise(peer, points, reason):
                self._world.sometimes("gossip/blamed a peer", True)
                self._host.penalise(peer, points, reason)

    def _validate(self, identity: bytes, topic: str, author: PeerId, data: bytes) -> None:
        validity = Validity.IGNORE  # the answer if the validator crashes
        try:
            validity = self._ask_validator(topic, author, data)
        finally:
            self._drive(Validated(identity, validity))

    def _ask_validator(self, topic: str, author: PeerId, data: bytes) -> Validity:
        subscription = self._subscriptions.get(topic)
        if subscription is None:
            return Validity.IGNORE
        try:
            return subscription.validate(author, data)
        except BadMessage as error:
            logger.info("gossip.rejected topic=%s author=%r reason=%s", topic, author, error)
            return Validity.REJECT


@asynccontextmanager
async def open_gossip(
    world: World,
    host: Host,
    config: GossipConfig | None = None,
) -> AsyncIterator[Gossip]:
    """Publish and subscribe on ``host`` for the length of the block."""
    config = config or GossipConfig()
    if world.buggify("gossip/thin mesh"):
        config = replace(config, low=min(2, config.low), degree=config.low)
    core = GossipCore(
        world.signer,
        config,
        world.rng("gossip"),
        verify=world.verify,
        seqno=int(world.wall() * 1e9),
    )
    gossip = Gossip(world, host, core)
    with gossip._serving():
        yield gossip
