"""Gossip's transcripts. The core is that of ``me``; peers and messages go by names.

    connect PEER [dialled]      disconnect PEER
    subscribe TOPIC             unsubscribe TOPIC          publish NAME TOPIC
    receive PEER: PART; PART    where a PART is ``subscribe TOPIC``, ``graft TOPIC``,
                                ``prune TOPIC SECONDS``, ``ihave TOPIC NAME...``,
                                ``iwant NAME...``, ``message NAME TOPIC by PEER``,
                                or ``forged NAME TOPIC by PEER``
    accept NAME                 ignore NAME                reject NAME
    wait SECONDS                heartbeats come when they are due

Below a step stand the effects, then what it has changed: meshes, scores, open promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from p2p.events import PeerDown, PeerUp, Penalise, Received, Send, Tick
from p2p.gossip import messages as msg
from p2p.gossip.config import GossipConfig
from p2p.gossip.core import events as ev
from p2p.gossip.core.core import GossipCore
from p2p.identity import PeerId
from tests.transcripts import changes, player
from tests.unit.core_swarm import FakeSigner, fake_verify as verify, peer_named


@player("gossip")
class GossipPlayer:
    """One gossip core and the names of its peers and messages."""

    def __init__(self) -> None:
        self._now = 0.0
        self._peers: dict[str, PeerId] = {}
        self._names: dict[PeerId, str] = {}
        self._messages: dict[str, msg.PubsubMessage] = {}
        self._ids: dict[bytes, str] = {}
        self._asked: dict[str, ev.Validate] = {}
        self._published = 0
        signer = FakeSigner(self._peer("me"))
        config = GossipConfig(degree=2, low=2, high=3, outbound=1)
        self._core = GossipCore(signer, config, Random(1), verify=verify, seqno=0)
        self._core.handle(Tick(), self._now)

    def play(self, command: str, args: list[str]) -> Iterator[str]:
        before = self._state()
        if command == "wait":
            yield from self._wait(float(args[0]))
        else:
            yield from self._feed(self._event(command, args))
        yield from changes(before, self._state())

    def _wait(self, seconds: float) -> list[str]:
        end, out = self._now + seconds, []
        while self._core.next_deadline <= end:
            self._now = self._core.next_deadline
            out += [f"{self._now:g} s: {said}" for said in self._feed(Tick())]
        self._now = end
        return out

    def _feed(self, event: ev.Event) -> list[str]:
        return [self._show(effect) for effect in self._core.handle(event, self._now)]

    def _event(self, verb: str, words: list[str]) -> ev.Event:
        match verb:
            case "connect":
                return PeerUp(self._peer(words[0]), dialled="dialled" in words)
            case "disconnect":
                return PeerDown(self._peer(words[0]))
            case "subscribe":
                return ev.Subscribe(words[0])
            case "unsubscribe":
                return ev.Unsubscribe(words[0])
            case "publish":
                return self._publish(*words)
            case "receive":
                peer, _, parts = " ".join(words).partition(": ")
                return Received(self._peer(peer), msg.encode_rpc(self._rpc(parts.split("; "))))
            case _:
                return ev.Validated(self._asked[words[0]], ev.Validity(verb))

    def _publish(self, name: str, topic: str) -> ev.Publish:
        self._published += 1
        author = self._peer("me").digest
        identity = author + self._published.to_bytes(msg.SEQNO_BYTES, "big")
        self._ids[identity] = name
        return ev.Publish(topic, name.encode())

    def _rpc(self, parts: list[str]) -> msg.Rpc:
        rpc = msg.Rpc()
        for part in parts:
            verb, *words = part.split()
            put: dict[str, Callable[[], None]] = {
                "subscribe": lambda words=words: rpc.subscriptions.append((words[0], True)),
                "graft": lambda words=words: rpc.graft.append(words[0]),
                "prune": lambda words=words: rpc.prune.append((words[0], int(words[1]))),
                "ihave": lambda words=words: rpc.ihave.append(
                    (words[0], self._identities(words[1:]))
                ),
                "iwant": lambda words=words: rpc.iwant.extend(self._identities(words)),
                "message": lambda words=words: rpc.messages.append(self._message(*words)),
                "forged": lambda words=words: rpc.messages.append(
                    replace(self._message(*words), signature=bytes(64))
                ),
            }
            put[verb]()
        return rpc

    def _message(
        self, name: str, topic: str = "news", by: str = "by", author: str = "frank"
    ) -> msg.PubsubMessage:
        known = self._messages.get(name)
        if known is None:
            seqno = 1000 + len(self._messages)
            known = msg.sign_message(
                FakeSigner(self._peer(author)), topic, name.encode(), seqno
            )
            self._messages[name] = known
            self._ids[known.id] = name
        return known

    def _identities(self, names: list[str]) -> list[bytes]:
        own = {name: identity for identity, name in self._ids.items()}
        return [own.get(name) or self._message(name).id for name in names]

    def _peer(self, name: str) -> PeerId:
        if name not in self._peers:
            self._peers[name] = peer_named(len(self._peers))
            self._names[self._peers[name]] = name
        return self._peers[name]

    # What is printed.

    def _show(self, effect: ev.Effect) -> str:
        match effect:
            case Send(peer, data):
                rpc = msg.decode_rpc_untrusted(data)
                return f"send {self._names[peer]}: {self._show_rpc(rpc)}"
            case ev.Validate(message, author):
                name = self._ids[message.id]
                self._asked[name] = effect
                return f"validate {name} in {message.topic} by {self._names[author]}"
            case ev.Deliver(topic, author, data):
                return f"deliver {data.decode()} in {topic} by {self._names[author]}"
            case Penalise(peer, offence, reason):
                return f"penalise {self._names[peer]} {offence.points:g} points: {reason}"

    def _show_rpc(self, rpc: msg.Rpc) -> str:
        ids = self._ids
        parts = [
            f"{'subscribe' if yes else 'leave'} {topic}" for topic, yes in rpc.subscriptions
        ]
        parts += [f"message {ids[message.id]}" for message in rpc.messages]
        parts += [
            f"ihave {topic} {' '.join(ids[each] for each in said)}" for topic, said in rpc.ihave
        ]
        if rpc.iwant:
            parts.append(f"iwant {' '.join(ids[each] for each in rpc.iwant)}")
        parts += [f"graft {topic}" for topic in rpc.graft]
        parts += [f"prune {topic} {backoff}" for topic, backoff in rpc.prune]
        return "; ".join(parts)

    def _state(self) -> dict[str, str]:
        core, names = self._core, self._names
        state = {
            f"mesh of {topic}": " ".join(names[peer] for peer in mesh) or "empty"
            for topic, mesh in core.topics.items()
        }
        for peer, name in names.items():
            owed = [self._ids[each] for each in core._promises._of.get(peer, ())]
            if owed:
                state[f"promised by {name}"] = " ".join(owed)
            if core._earned.first_deliveries(peer):
                state[f"first deliveries of {name}"] = (
                    f"{core._earned.first_deliveries(peer):.2f}"
                )
        return state
