"""The driver of `GossipCore`: feeds it the host's events and the clock, carries out its effects."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from p2p.errors import BadMessage
from p2p.gossip.core.core import GossipCore
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
from p2p.gossip.messages import MAX_RPC, PROTOCOL_ID
from p2p.host import Host, PeerEvent, PeerState
from p2p.identity import PeerId
from p2p.world import Timer, World, lateness

Validator = Callable[[PeerId, bytes], Validity]
"""Judges what a peer published, by author and data; must not block. `BadMessage` counts as `REJECT`."""
Handler = Callable[[PeerId, bytes], None]
"""Takes what was accepted, by author and data; must not block."""


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
        self._closed = False

    def subscribe(self, topic: str, validate: Validator, deliver: Handler) -> None:
        """Hear ``topic``; what ``validate`` accepts is delivered once, and passed on.

        A message may come again when it is older than the memory for ids (two minutes): validators say
        `IGNORE` to old news. Raises `ValueError` if the topic's name is empty or longer than 128 bytes, or
        if 64 topics are heard already.
        """
        self._drive(Subscribe(topic))
        self._subscriptions[topic] = _Subscription(validate, deliver)

    def unsubscribe(self, topic: str) -> None:
        """Hear ``topic`` no more."""
        self._subscriptions.pop(topic, None)
        self._drive(Unsubscribe(topic))

    def publish(self, topic: str, data: bytes) -> None:
        """Tell all who hear ``topic``; we ourselves are not told. Subscribing is not needed.

        Raises `ValueError` if ``data`` is larger than 256 KiB or the topic's name too long.
        """
        self._drive(Publish(topic, data))

    @property
    def topics(self) -> Mapping[str, tuple[PeerId, ...]]:
        """The topics we hear, each with the peers of our mesh."""
        return self._core.topics

    @property
    def counters(self) -> Mapping[str, int]:
        """Messages by what became of them."""
        return self._core.counters

    def _open(self) -> None:
        self._host.set_message_handler(
            PROTOCOL_ID, lambda peer, data: self._drive(Received(peer, data)), max_message=MAX_RPC
        )
        self._host.on_peer(self._on_peer)
        for peer in self._host.connected:
            self._drive(Connected(peer))
        self._on_timer()

    def _close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _on_peer(self, event: PeerEvent) -> None:
        if event.state is PeerState.CONNECTED:
            self._drive(Connected(event.peer, event.dialled))
        elif event.state is PeerState.DISCONNECTED:
            self._drive(Disconnected(event.peer))

    def _on_timer(self) -> None:
        self._drive(Tick())
        if not self._closed:
            self._world.sometimes("gossip/heard it twice", self._core.counters["duplicate"] > 0)
            due = max(self._core.next_deadline, self._world.now())
            when = due + lateness(self._world, "gossip/late heartbeat")
            self._timer = self._world.call_at(when, self._on_timer)

    def _drive(self, event: Event) -> None:
        if not self._closed:
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
        validity = Validity.IGNORE  # if the validator crashes, the core is not to wait for its answer
        try:
            validity = self._judge(topic, author, data)
        finally:
            self._drive(Validated(identity, validity))

    def _judge(self, topic: str, author: PeerId, data: bytes) -> Validity:
        subscription = self._subscriptions.get(topic)
        if subscription is None:
            return Validity.IGNORE
        try:
            return subscription.validate(author, data)
        except BadMessage as error:
            logger.info("gossip.rejected topic=%s author=%r reason=%s", topic, author, error)
            return Validity.REJECT


@asynccontextmanager
async def open_gossip(world: World, host: Host, config: GossipConfig | None = None) -> AsyncIterator[Gossip]:
    """Publish and subscribe for the length of the block."""
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
    gossip._open()
    try:
        yield gossip
    finally:
        gossip._close()
