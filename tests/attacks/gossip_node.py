"""One gossip core under attack, on virtual time, with a host's score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from p2p.events import PeerDown, PeerUp, Penalise, Received, Send, Tick
from p2p.gossip import messages as messages_module
from p2p.gossip.config import GossipConfig
from p2p.gossip.core.core import GossipCore
from p2p.gossip.core.events import Deliver, Subscribe, Validate, Validated, Validity
from p2p.gossip.messages import (
    PubsubMessage,
    Rpc,
    decode_rpc_untrusted,
    encode_rpc,
    sign_message,
)
from p2p.identity import PeerId
from p2p.swarm.core.gater import Scores
from tests.unit.core_swarm import FakeSigner, fake_verify, peer_named

TOPIC = "run/policy"


class Victim:
    """A node that hears `TOPIC`, ignores data that begins with ``old``, and rejects ``bad``."""

    def __init__(self) -> None:
        self.now = 100.0
        self.verified = 0
        self.sent: Counter[PeerId] = Counter()
        self.rpcs: dict[PeerId, list[Rpc]] = {}
        self.delivered: list[bytes] = []
        self.points: Counter[PeerId] = Counter()
        self.refused: dict[PeerId, float] = {}
        self._scores = Scores()
        self.core = GossipCore(
            FakeSigner(peer_named(0)),
            GossipConfig(),
            Random(1),
            verify=self._verify,
            seqno=1_700_000_000,
        )
        self.do(Tick())
        self.do(Subscribe(TOPIC))

    def _verify(self, peer: PeerId, domain: str, payload: bytes, signature: bytes) -> bool:
        self.verified += 1
        return fake_verify(peer, domain, payload, signature)

    def do(self, event: Any) -> None:
        for effect in self.core.handle(event, self.now):
            match effect:
                case Send(peer, data):
                    self.sent[peer] += len(data)
                    self.rpcs.setdefault(peer, []).append(decode_rpc_untrusted(data))
                case Validate(message):
                    self.do(Validated(effect, _judge(message.data or b"")))
                case Deliver(_, _, data):
                    self.delivered.append(data)
                case Penalise(peer, offence, _):
                    self.points[peer] += offence.points
                    if self._scores.penalise(peer, offence.points, self.now):
                        self.refused.setdefault(peer, self.now)
                        self.do(PeerDown(peer))

    def meet(self, *peers: PeerId, hears: bool = True) -> None:
        for peer in peers:
            self.do(PeerUp(peer))
            if hears:
                self.hear(peer, Rpc(subscriptions=[(TOPIC, True)]))

    def hear(self, peer: PeerId, rpc: Rpc) -> None:
        self.do(Received(peer, encode_rpc(rpc)))

    def later(self, seconds: float) -> None:
        until = self.now + seconds
        while self.core.next_deadline <= until:
            self.now = max(self.now, self.core.next_deadline)
            self.do(Tick())
        self.now = until

    def mesh(self) -> set[PeerId]:
        return set(self.core.topics[TOPIC])

    def flood(
        self, peer: PeerId, rpcs: Callable[[int], bytes], *, rate: int, seconds: float
    ) -> Flood:
        """``rate`` RPCs a second by ``peer`` for ``seconds``, or until it is refused."""
        flood = Flood()
        since = self.now
        steps = round(seconds * 50)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages_module, "decode_rpc_untrusted", flood.decode)
            for step in range(steps):
                for number in range(step * rate // 50, (step + 1) * rate // 50):
                    if peer in self.refused:
                        break
                    flood.sent += 1
                    self.do(Received(peer, rpcs(number)))
                self.later(0.02)
        flood.seconds = self.refused.get(peer, self.now) - since
        return flood


class Flood:
    """What became of a flood."""

    def __init__(self) -> None:
        self.sent = self.decoded = self.fields = 0
        self.seconds = 0.0

    def decode(self, data: bytes) -> Rpc:
        self.decoded += 1
        rpc = decode_rpc_untrusted(data)
        self.fields += rpc.fields
        return rpc


def _judge(data: bytes) -> Validity:
    if data.startswith(b"old"):
        return Validity.IGNORE
    return Validity.REJECT if data.startswith(b"bad") else Validity.ACCEPT


def said(
    author: PeerId, data: bytes = b"good", *, seqno: int = 7, topic: str = TOPIC
) -> PubsubMessage:
    return sign_message(FakeSigner(author), topic, data, seqno)
