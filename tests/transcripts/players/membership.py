"""A few membership cores whose messages wait until the transcript has them delivered.

Steps:

- ``nodes ann bob ...``: so many cores, which do not know each other yet;
- ``members ann bob ...``: the same, once they have joined one after the other;
- ``join bob ann``: bob is told of ann and asks her to take him in;
- ``deliver [COUNT]``: what is under way arrives, the oldest first, until nothing is (or COUNT
  did);
- ``drop bob``: what is under way to and from bob is lost;
- ``say dan cat suspects bob``: dan's message "nothing newer came from bob" reaches cat;
- ``kill bob``: bob stops, and no host notices: a power cut;
- ``wait SECONDS``: time passes, cores get the ticks that they asked for, and messages arrive.

A line without indent is an event at a node, the lines below it are the effects. Effects that
only remember addresses or numbers are left out, and so are, during ``wait``, ticks and
heartbeats of which nothing but heartbeats comes. At the end of a step stands the state of each
node that changed in it: its neighbours, and the other members that it knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random

from p2p.events import Penalise, Received, Send, Tick
from p2p.identity import PeerId
from p2p.membership import messages as msg
from p2p.membership.core import events as ev
from p2p.membership.core.core import MembershipCore
from p2p.membership.heartbeat import SignedHeartbeat, key_of
from p2p.multiaddr import Multiaddr
from tests.transcripts import player
from tests.unit.core_swarm import peer_named
from tests.unit.membership_swarm import WALL, make_core

FIRST_SEQNO = 1
LATENCY = 0.05
"""Seconds between an effect and its arrival while time passes."""


@player("membership")
class MembershipPlayer:
    """Cores by name, what is under way between them, and what was last told of their state."""

    def __init__(self) -> None:
        self.cores: dict[str, MembershipCore] = {}
        self.names: dict[PeerId, str] = {}
        self.flights: deque[tuple[str, str, bytes]] = deque()
        self.dead: set[str] = set()
        self.told: dict[str, str] = {}
        self.now = 0.0

    def play(self, command: str, args: list[str]) -> Iterator[str]:
        match command, args:
            case "nodes", names:
                self.make(names)
            case "members", [first, *others]:
                self.make([first, *others])
                for name in others:
                    list(self.join(name, first))
                    list(self.deliver(1000))
            case "join", [name, other]:
                yield from self.join(name, other)
            case "deliver", []:
                yield from self.deliver(1000)
            case "deliver", [count]:
                yield from self.deliver(int(count))
            case "drop", [name]:
                yield from self.drop(name)
            case "say", [teller, hearer, "suspects", name]:
                yield from self.suspect(teller, hearer, name)
            case "kill", [name]:
                self.dead.add(name)
                self.told[name] = "dead"
                yield f"= {name}: dead"
            case "wait", [seconds]:
                yield from self.wait(float(seconds))
            case _:
                raise ValueError(f"no step {command} {' '.join(args)}")
        yield from self.states()

    def make(self, names: list[str]) -> None:
        for number, name in enumerate(names):
            peer = peer_named(number)
            self.names[peer] = name
            self.cores[name] = make_core(
                FIRST_SEQNO, number, rng=Random(number), wall=lambda: WALL + self.now
            )

    def join(self, name: str, other: str) -> Iterator[str]:
        peer = self.cores[other].peer
        addr = Multiaddr.parse(f"/memory/{list(self.cores).index(other)}").with_peer(peer)
        yield from self.give(name, ev.Bootstrap((addr,)), f"is told of {other}")
        yield from self.give(name, Tick(), f"tick at {self.now:g} s")

    def deliver(self, count: int) -> Iterator[str]:
        while count and self.flights:
            count -= 1
            sender, receiver, data = self.flights.popleft()
            yield from self.arrive(sender, receiver, data)

    def drop(self, name: str) -> Iterator[str]:
        for sender, receiver, data in self.flights:
            if name in (sender, receiver):
                message = msg.decode_message_untrusted(data)
                yield f"lost: {sender} -> {receiver}: {self.text(message)}"
        self.flights = deque(flight for flight in self.flights if name not in flight[:2])

    def suspect(self, teller: str, hearer: str, name: str) -> Iterator[str]:
        signed = self.cores[name]._local.newest()
        yield from self.arrive(teller, hearer, msg.encode_message(msg.Suspect((signed,))))

    def wait(self, seconds: float) -> Iterator[str]:
        end = self.now + seconds
        while True:
            alive = [name for name in self.cores if name not in self.dead]
            due = min(self.cores[name].next_deadline for name in alive)
            if self.flights and due > self.now + LATENCY:
                if self.now + LATENCY > end:
                    break
                self.now += LATENCY
                yield from self.deliver_quietly()
                continue
            if due > end:
                break
            self.now = max(self.now, due)
            for name in alive:
                if self.cores[name].next_deadline <= self.now:
                    yield from self.give(name, Tick(), f"tick at {self.now:.2f} s", quiet=True)
        self.now = end

    def deliver_quietly(self) -> Iterator[str]:
        for _ in range(len(self.flights)):
            sender, receiver, data = self.flights.popleft()
            yield from self.arrive(sender, receiver, data, quiet=True)

    # Events and effects

    def arrive(
        self, sender: str, receiver: str, data: bytes, *, quiet: bool = False
    ) -> Iterator[str]:
        if receiver in self.dead:
            return
        message = msg.decode_message_untrusted(data)
        event = Received(self.cores[sender].peer, data)
        is_routine = quiet and isinstance(message, msg.Beat | msg.Newcomers | msg.Want)
        words = f"{sender} says {self.text(message)}"
        yield from self.give(receiver, event, words, quiet=is_routine)

    def give(
        self, name: str, event: ev.Event, words: str, *, quiet: bool = False
    ) -> Iterator[str]:
        """Let a core judge an event; gives it and what came of it."""
        lines, is_routine = [], quiet
        for effect in self.cores[name].handle(event, self.now):
            if isinstance(effect, Send):
                receiver = self.names[effect.peer]
                self.flights.append((name, receiver, effect.data))
                message = msg.decode_message_untrusted(effect.data)
                is_routine = is_routine and isinstance(
                    message, msg.Beat | msg.Newcomers | msg.Want
                )
                lines.append(f"-> {receiver}: {self.text(message)}")
            elif isinstance(effect, ev.MemberEvent):
                is_routine = False
                lines.append(f"{self.names[effect.member.peer]} {effect.change.value}")
            elif isinstance(effect, Penalise):
                is_routine = False
                lines.append(
                    f"{self.names[effect.peer]} loses {effect.offence.points:g}:"
                    f" {effect.reason}"
                )
        if not is_routine and (lines or not quiet):
            yield f"{name}: {words}"
            yield from (f"  {line}" for line in lines)

    # Words

    def named(self, heartbeats: tuple[SignedHeartbeat, ...]) -> str:
        return " ".join(f"{self.names[each.peer]}#{each.seqno}" for each in heartbeats)

    def text(self, message: msg.Message) -> str:
        keys = {key_of(peer): name for peer, name in self.names.items()}
        match message:
            case msg.Beat(is_neighbour, signed, digests):
                more = " ".join(f"{keys[key]}#{seqno}" for key, seqno, _ in digests)
                kind = "neighbour" if is_neighbour else "stranger"
                return f"heartbeat {self.named((signed,))} to a {kind}" + (
                    f", knows {more}" if more else ""
                )
            case msg.Join(signed):
                return f"join {self.named((signed,))}"
            case msg.ForwardJoin(hops, signed):
                return f"forward join {self.named((signed,))}, {hops} hops left"
            case msg.Neighbor(urgent, signed):
                return f"neighbor {self.named((signed,))}" + (", urgent" if urgent else "")
            case msg.NeighborReply(accepted, signed):
                return f"neighbor reply {self.named((signed,))}: {'yes' if accepted else 'no'}"
            case msg.Disconnect():
                return "disconnect"
            case msg.Newcomers(digests):
                return "newcomers " + " ".join(
                    f"{keys[key]}#{seqno}" for key, seqno, _ in digests
                )
            case msg.Want(wanted):
                return "want " + " ".join(keys[key] for key in wanted)
            case msg.Heartbeats(heartbeats):
                return f"heartbeats {self.named(heartbeats)}"
            case msg.Suspect(heartbeats):
                return f"suspect {self.named(heartbeats)}"

    def states(self) -> Iterator[str]:
        """The state of each node that is another than when it was last told."""
        for name, core in self.cores.items():
            if name in self.dead:
                continue
            neighbours = [self.names[peer] for peer in core.neighbours]
            members = [self.names[member.peer] for member in core.members()]
            others = [member for member in members if member not in neighbours]
            state = f"neighbours {' '.join(neighbours) or 'none'}"
            state += f"; knows {' '.join(others)}" if others else ""
            if self.told.get(name, "neighbours none") != state:
                self.told[name] = state
                yield f"= {name}: {state}"
