"""The driver of `GossipCore`: the host's events in, its effects carried out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from p2p.door import check, check_function, check_host, check_world
from p2p.driver import Driver
from p2p.errors import BadMessage
from p2p.events import Tick
from p2p.gossip.config import GossipConfig
from p2p.gossip.core import events as ev
from p2p.gossip.core.core import GossipCore
from p2p.gossip.core.mesh import MAX_TOPICS_OF_PEER
from p2p.gossip.messages import MAX_RPC, PROTOCOL_ID
from p2p.host import Host
from p2p.identity import PeerId
from p2p.world import World, lateness

Validator = Callable[[PeerId, bytes], ev.Validity]
"""Returns the verdict on a message from its author and data. It is called on the event loop and
must not block. If it raises `BadMessage`, that counts as `REJECT`."""
Handler = Callable[[PeerId, bytes], None]
"""Takes the author and data of an accepted message. It is called on the event loop and must not
block."""


logger = logging.getLogger(__name__)


class Gossip:
    """Publishes and subscribes for one node. Open it with `open_gossip`."""

    def __init__(self, world: World, host: Host, core: GossipCore) -> None:
        self._world = world
        self._host = host
        self._core = core
        late = partial(lateness, world, "gossip/late heartbeat")
        self._driver: Driver[ev.Event, ev.OwnEffect] = Driver(
            world, core, self._carry_out, self._on_deadline, late
        )
        self._subscriptions: dict[str, tuple[Validator, Handler]] = {}

    def subscribe(
        self, topic: str, validate: Validator, deliver: Handler = lambda _, __: None
    ) -> None:
        """Subscribe to ``topic``. Each message that ``validate`` accepts is passed to
        ``deliver`` once, and forwarded.

        A message can come again when its id has left the seen cache after two minutes, so a
        validator answers `Validity.IGNORE` to a version that it has had. Subscribing again
        replaces both functions. Raises `ValueError` if the topic's name is empty or longer than
        128 bytes, or if this node subscribes to 64 topics already.
        """
        check("topic", topic, str)
        check_function("validate", validate, 2)
        check_function("deliver", deliver, 2)
        self._driver.check_running("gossip")
        if topic not in self._subscriptions and len(self._subscriptions) >= MAX_TOPICS_OF_PEER:
            raise ValueError(f"peers remember at most {MAX_TOPICS_OF_PEER} topics of a node")
        self._driver.feed(ev.Subscribe(topic))
        self._subscriptions[topic] = validate, deliver

    def unsubscribe(self, topic: str) -> None:
        """Leave ``topic``, if the node subscribes to it."""
        check("topic", topic, str)
        self._subscriptions.pop(topic, None)
        self._driver.feed(ev.Unsubscribe(topic))

    def publish(self, topic: str, data: bytes) -> None:
        """Send ``data`` to the subscribers of ``topic``, but not to this node's own handler.
        The node need not subscribe to it.

        Raises:
            ValueError: The data is larger than 256 KiB, or the topic's name is empty or too
                long.
        """
        check("topic", topic, str)
        check("data", data, bytes)
        self._driver.check_running("gossip")
        self._driver.feed(ev.Publish(topic, data))

    @property
    def topics(self) -> Mapping[str, tuple[PeerId, ...]]:
        """Maps each topic that this node subscribes to to the peers of its mesh."""
        return self._core.topics

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts messages and RPCs by outcome."""
        return self._core.counters

    def _on_deadline(self) -> None:
        self._driver.feed(Tick())
        self._world.sometimes("gossip/heard it twice", self._core.counters["duplicate"] > 0)

    def _carry_out(self, effect: ev.OwnEffect) -> None:
        match effect:
            case ev.Validate():
                validity = ev.Validity.IGNORE  # the answer if the validator crashes
                try:
                    validity = self._ask_validator(effect)
                finally:
                    self._driver.feed(ev.Validated(effect, validity))
            case ev.Deliver(topic, author, data):
                self._world.trace("gossip.deliver", topic=topic, author=author)
                if topic in self._subscriptions:
                    self._subscriptions[topic][1](author, data)

    def _ask_validator(self, asked: ev.Validate) -> ev.Validity:
        topic, author = asked.message.topic, asked.author
        if topic not in self._subscriptions:
            return ev.Validity.IGNORE
        try:
            validity = self._subscriptions[topic][0](author, asked.message.data or b"")
            check("the answer of validate", validity, ev.Validity)
            return validity
        except BadMessage as error:
            logger.info("gossip.rejected topic=%s author=%r reason=%s", topic, author, error)
            return ev.Validity.REJECT


@asynccontextmanager
async def open_gossip(
    world: World, host: Host, config: GossipConfig | None = None
) -> AsyncIterator[Gossip]:
    """Publish and subscribe on ``host`` for the length of the block."""
    check_world(world)
    check_host(host)
    if config is not None:
        check("config", config, GossipConfig)
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
    with gossip._driver.serving(host, PROTOCOL_ID, gossip._on_deadline, MAX_RPC):
        yield gossip
