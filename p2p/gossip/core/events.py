"""Events and effects of `GossipCore`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from p2p.events import HostEffect, HostEvent
from p2p.gossip.messages import MAX_DATA, MAX_TOPIC, PubsubMessage
from p2p.identity import PeerId


class Validity(Enum):
    """Verdict of a topic's validator."""

    ACCEPT = "accept"
    """The message is good: deliver it and pass it on."""
    IGNORE = "ignore"
    """Drop the message, which other nodes may want (an old version, an author not known yet).
    It is charged to the sender's quota without a penalty."""
    REJECT = "reject"
    """The message is one that no honest peer forwards, such as a malformed one or one with a
    false signature in its data: drop it and penalise its forwarder. This is not for messages
    that a peer with other state may accept."""


# Events: what the core is told.


def _check_topic(topic: str) -> None:
    if not 0 < len(topic.encode()) <= MAX_TOPIC:
        raise ValueError(f"a topic has 1 to {MAX_TOPIC} bytes")


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe the node to ``topic``.

    Raises:
        ValueError: The topic's name is empty or too long.
    """

    topic: str

    def __post_init__(self) -> None:
        _check_topic(self.topic)


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """End the node's subscription to ``topic``."""

    topic: str


@dataclass(frozen=True, slots=True)
class Publish:
    """Sign ``data`` and send it to the subscribers of ``topic``.

    Raises:
        ValueError: The data is too long, or the topic's name is empty or too long.
    """

    topic: str
    data: bytes

    def __post_init__(self) -> None:
        _check_topic(self.topic)
        if len(self.data) > MAX_DATA:
            raise ValueError(
                f"a message carries at most {MAX_DATA} bytes, not {len(self.data)}"
            )


# Effects: what the driver is to do, beside those of `p2p.events`.


@dataclass(frozen=True, slots=True)
class Validate:
    """Ask the topic's validator about a message whose signature is good. The message is neither
    delivered nor forwarded before `Validated` accepts it."""

    message: PubsubMessage
    author: PeerId
    source: PeerId
    """Peer that brought the message."""


@dataclass(frozen=True, slots=True)
class Validated:
    """Event: reports the validator's verdict on what a `Validate` asked."""

    asked: Validate
    validity: Validity


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand an accepted message to the topic's subscriber on this node."""

    topic: str
    author: PeerId
    data: bytes


Event = HostEvent | Subscribe | Unsubscribe | Publish | Validated
OwnEffect = Validate | Deliver
Effect = HostEffect | OwnEffect
