"""A few SHARDCAST cores whose messages wait until the transcript has them delivered.

Steps:

- ``swarm origin ann bob ...``: an origin, and peers that its roster names;
- ``publish v1 chunks=3``: the origin publishes a version;
- ``contradict v1 to ann``: the origin signs another v1, and bob tells ann of it;
- ``newcomer dan``: dan, whom no roster names, meets all others;
- ``deliver [COUNT]``: what is under way arrives, the oldest first, until nothing is (or COUNT
  did);
- ``drop ann->bob``: what is under way there is lost, and the chunk counts as sent;
- ``deafen ann->bob``: from now on all that leaves there is lost;
- ``lose bob``: bob dies, and all others learn of it;
- ``restart origin``: the origin comes back with what its disk held, and meets all others;
- ``wait SECONDS``: time passes, and cores get the ticks that they asked for.

A line without indent is an event at a node, the lines below it are the effects. Chunks are
kept, and policies stored, at once and without a word. Ticks, chunks, and what peers tell of
themselves are left out if nothing comes of them. At the end of a step stands the state of each
node that changed in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random

from p2p.identity import KeyPair, PeerId, verify
from p2p.shardcast import messages as msg
from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.config import ShardcastConfig
from p2p.shardcast.core import events as ev
from p2p.shardcast.core.core import ShardcastCore
from p2p.shardcast.core.statements import Statements
from p2p.shardcast.forest import Roster, RosterEntry, build_forest
from p2p.shardcast.index import Index, digest_of
from p2p.shardcast.manifest import NO_POLICY, Encoding, Manifest, PolicyVersion
from p2p.wire import KI
from tests.shardcast_policies import pack_policy
from tests.transcripts import player

RUN = b"transcript"
SPAN = 32 * KI
UPLOAD = 5e6
ROUTINE = (msg.Credit, msg.Have, msg.Hello, msg.PolicyNews, msg.Receipt, msg.RosterNews)
Flight = tuple[str, str, msg.Message | msg.ChunkHeader | None]
"""From, to, and what: None is a gossiped announcement, which waits in
`ShardcastPlayer.gossip`."""


class Machine:
    """One node: its core, and the chunks on its disk."""

    def __init__(self, name: str, trainer: PeerId | None = None) -> None:
        self.name = name
        self.key = KeyPair(digest_of(name.encode()))
        self.trainer = trainer or self.key.peer_id
        self.chunks: dict[tuple[bytes, int], bytes] = {}
        self.is_alive = True
        self.boot()

    def boot(self) -> None:
        """A new life, with an empty memory."""
        self.statements = Statements(RUN, self.trainer.__eq__, verify)
        rng = Random(digest_of(self.name.encode()))
        self.core = ShardcastCore(self.key.peer_id, ShardcastConfig(), self.statements, rng)


@player("shardcast")
class ShardcastPlayer:
    """Plays `tests/transcripts/shardcast/*.txt`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.machines: dict[str, Machine] = {}
        self.names: dict[PeerId, str] = {}
        self.versions: dict[bytes, tuple[Manifest, Index]] = {}
        self.roster: Roster | None = None
        self.flights: deque[Flight] = deque()
        self.news: deque[tuple[str, str, msg.Message]] = deque()
        self.said: dict[str, str] = {}
        self.deaf: set[tuple[str, ...]] = set()

    def play(self, command: str, args: list[str]) -> Iterator[str]:
        match command, args:
            case "swarm", names:
                yield from self.swarm(names)
            case "publish", [version, count]:
                yield from self.publish(version, count)
            case "contradict", [version, "to", name]:
                yield from self.contradict(int(version[1:]), name)
            case "newcomer", [name]:
                self.machines[name] = Machine(name, self.origin.key.peer_id)
                self.names[self.peer(name)] = name
                yield from self.meet(name)
            case "deliver", []:
                yield from self.deliver(10_000)
            case "deliver", [count]:
                yield from self.deliver(int(count))
            case "drop", [line]:
                yield from self.drop(*line.split("->"))
            case "deafen", [line]:
                self.deaf.add(tuple(line.split("->")))
            case "lose", [name]:
                yield from self.lose(name)
            case "restart", [name]:
                yield from self.restart(name)
            case "wait", [seconds]:
                yield from self.wait(float(seconds))
            case _:
                raise ValueError(f"no such step: {command} {args}")
        yield from self.states()

    # Steps

    def swarm(self, names: list[str]) -> Iterator[str]:
        trainer = KeyPair(digest_of(names[0].encode()))
        for name in names:
            machine = self.machines[name] = Machine(name, trainer.peer_id)
            self.names[machine.key.peer_id] = name
        entries = [RosterEntry(self.machines[name].key.peer_id, UPLOAD) for name in names[1:]]
        self.roster = Roster.sign(trainer, RUN, 1, entries)
        forest = build_forest(self.roster, PolicyVersion(1))
        for number, root in enumerate(forest.roots):
            children = forest.children(number, root, lambda _: False)
            below = " ".join(self.names[child] for child in children)
            yield f"stripe {number} of v1: {names[0]} -> {self.names[root]} -> {below}"

    def publish(self, version: str, count: str) -> Iterator[str]:
        origin, chunks = self.origin, int(count.removeprefix("chunks="))
        manifest, index, wires = self.sign(origin, int(version[1:]), chunks)
        for chunk, wire in enumerate(wires):
            origin.chunks[manifest.digest, chunk] = wire
        event = ev.Publish(manifest, index, self.roster)
        yield from self.give(origin, event, f"v{self.version(manifest.digest)} is durable")

    def contradict(self, version: int, name: str) -> Iterator[str]:
        origin = self.origin
        manifest, index, _ = self.sign(origin, version, 1)
        event = ev.Heard(self.peer("bob"), msg.news_of(manifest, index))
        words = f"bob says policy v{self.version(manifest.digest)} with index"
        yield from self.hear(name, event, words)

    def sign(
        self, origin: Machine, version: int, count: int
    ) -> tuple[Manifest, Index, list[bytes]]:
        same = sum(m.version == version for m, _ in self.versions.values())
        raw = Random(version + 1000 * same).randbytes(SPAN * count)
        index, wires = pack_policy(raw, SPAN)
        before = max(
            (m for m, _ in self.versions.values() if m.version < version),
            key=lambda m: m.version,
            default=None,
        )
        manifest = Manifest(
            origin.key.peer_id,
            RUN,
            PolicyVersion(version),
            before.version if before is not None else NO_POLICY,
            before.digest if before is not None else b"",
            index.digest,
            len(raw),
            (Encoding.anchor(index, sum(map(len, wires))),),
        ).sign(origin.key)
        self.versions[manifest.digest] = manifest, index
        return manifest, index, wires

    def deliver(self, count: int) -> Iterator[str]:
        while count and (self.news or self.flights):
            count -= 1
            if self.news:
                sender, receiver, message = self.news.popleft()
                event = ev.Heard(self.peer(sender), message, gossip=True)
                yield from self.hear(
                    receiver, event, f"gossip of {sender}: {self.text(message)}"
                )
                continue
            sender, receiver, item = self.flights.popleft()
            if (sender, receiver) in self.deaf:
                if isinstance(item, msg.ChunkHeader):
                    sent = ev.ChunkSent(self.peer(receiver), SPAN)
                    words = f"chunk {item.index} for {receiver} is thrown away"
                    yield from self.hear(sender, sent, words)
                continue
            if isinstance(item, msg.ChunkHeader):
                data = self.machines[sender].chunks[item.policy, item.index]
                came = ev.ChunkCame(self.peer(sender), item, len(data))
                yield from self.hear(receiver, came, f"{sender} brings {self.text(item)}")
                sent = ev.ChunkSent(self.peer(receiver), len(data))
                yield from self.hear(
                    sender, sent, f"chunk {item.index} for {receiver} has left"
                )
            elif item is not None:
                event = ev.Heard(self.peer(sender), item)
                yield from self.hear(receiver, event, f"{sender} says {self.text(item)}")

    def drop(self, sender: str, receiver: str) -> Iterator[str]:
        lost = [item for one, other, item in self.flights if (one, other) == (sender, receiver)]
        self.flights = deque(f for f in self.flights if f[:2] != (sender, receiver))
        for item in lost:
            yield f"lost between {sender} and {receiver}: {self.text(item)}"
            if isinstance(item, msg.ChunkHeader):
                sent = ev.ChunkSent(self.peer(receiver), SPAN)
                yield from self.hear(
                    sender, sent, f"chunk {item.index} for {receiver} has left"
                )

    def lose(self, name: str) -> Iterator[str]:
        self.machines[name].is_alive = False
        self.flights = deque(f for f in self.flights if name not in f[:2])
        self.said[name] = "dead"
        for machine in self.others(name):
            yield from self.give(machine, ev.PeerDown(self.peer(name)), f"{name} is lost")

    def restart(self, name: str) -> Iterator[str]:
        machine = self.machines[name]
        machine.is_alive = True
        machine.boot()
        self.said.pop(name, None)
        if self.roster is not None and self.roster.origin == machine.key.peer_id:
            machine.statements.add_roster(self.roster)
        for manifest, index in self.versions.values():
            here = ChunkSet.of(
                c for c in range(len(index)) if (manifest.digest, c) in machine.chunks
            )
            event = ev.Resumed(manifest, index, here, len(here) == len(index))
            yield from self.give(
                machine,
                event,
                f"the disk holds {spans(here)} of v{self.version(manifest.digest)}",
            )
        yield from self.meet(name)

    def meet(self, name: str) -> Iterator[str]:
        machine = self.machines[name]
        for other in self.others(name):
            yield from self.give(
                machine, ev.PeerUp(other.key.peer_id), f"{other.name} is connected"
            )
            yield from self.give(other, ev.PeerUp(machine.key.peer_id), f"{name} is connected")

    def wait(self, seconds: float) -> Iterator[str]:
        end = self.now + seconds
        alive = [machine for machine in self.machines.values() if machine.is_alive]
        while (due := min(machine.core.next_deadline for machine in alive)) <= end:
            self.now = max(self.now, due)
            for machine in alive:
                if machine.core.next_deadline <= self.now:
                    yield from self.give(machine, ev.Tick(), f"tick at {self.now:.2f} s")
        self.now = end

    # Events and effects

    @property
    def origin(self) -> Machine:
        return next(iter(self.machines.values()))

    def peer(self, name: str) -> PeerId:
        return self.machines[name].key.peer_id

    def others(self, name: str) -> list[Machine]:
        return [m for m in self.machines.values() if m.name != name and m.is_alive]

    def hear(self, name: str, event: ev.Event, words: str) -> Iterator[str]:
        if self.machines[name].is_alive:
            yield from self.give(self.machines[name], event, words)

    def give(self, machine: Machine, event: ev.Event, words: str) -> Iterator[str]:
        """Let a core judge an event; gives it and what came of it, unless that is as usual
        nothing."""
        effects = machine.core.handle(event, self.now)
        lines = [line for effect in effects for line in self.carry_out(machine, effect)]
        if lines or not is_routine(event):
            yield f"{machine.name}: {words}"
            yield from (f"  {line}" for line in lines)

    def carry_out(self, machine: Machine, effect: ev.Effect) -> Iterator[str]:
        match effect:
            case ev.Send(peer, item) | ev.Push(peer, item):
                to = self.names[peer]
                self.flights.append((machine.name, to, item))
                yield f"-> {to}: {self.text(item)}"
            case ev.Gossip(message):
                self.news.extend(
                    (machine.name, o.name, message) for o in self.others(machine.name)
                )
                yield f"-> gossip: {self.text(message)}"
            case ev.Keep(policy, chunk):
                machine.chunks[policy, chunk] = self.origin.chunks[policy, chunk]
            case ev.Finish(policy):
                yield f"v{self.version(policy)} is whole"
                again = machine.core.handle(ev.Stored(policy), self.now)
                yield from (
                    line for effect in again for line in self.carry_out(machine, effect)
                )
            case ev.Penalise(peer, _, reason):
                yield f"{self.names[peer]} is banned: {reason}"
            case ev.Halt():
                yield "the trainer is halted"
            case ev.Abandon(policy):
                yield f"v{self.version(policy)} is given up"
            case ev.Regroup():
                yield from self.regroup(machine)
            case ev.Begin() | ev.PassOn() | ev.Connect():
                pass

    def regroup(self, machine: Machine) -> Iterator[str]:
        """Sign the next roster; nothing if it would be the old one."""
        last = self.roster
        entries = [RosterEntry(m.key.peer_id, UPLOAD) for m in self.others(machine.name)]
        believed = machine.core.believe(entries)
        if last is None:
            return
        roster = Roster.sign(machine.key, RUN, last.epoch + 1, believed)
        if (roster.peers, roster.classes) == (last.peers, last.classes):
            return
        self.roster = roster
        ranks = zip(roster.peers, roster.classes, strict=True)
        leaves = " ".join(self.names[peer] for peer, rank in ranks if not rank)
        yield f"signs a new roster, epoch {roster.epoch}, leaves: {leaves or 'none'}"
        effects = machine.core.handle(ev.Regrouped(roster), self.now)
        for effect in effects:
            yield from self.carry_out(machine, effect)

    # Words

    def version(self, policy: bytes) -> str:
        """Its number; with a letter if another one of that number was signed before it."""
        number = self.versions[policy][0].version
        same = [d for d, (m, _) in self.versions.items() if m.version == number]
        return f"{number}{' bcd'[same.index(policy)].strip()}"

    def text(self, item: msg.Message | msg.ChunkHeader | None) -> str:
        match item:
            case msg.ChunkHeader(policy, chunk, _, stripe):
                way = "asked for" if stripe == msg.NO_STRIPE else f"stripe {stripe}"
                return f"chunk {chunk} of v{self.version(policy)}, {way}"
            case msg.PolicyNews(manifest, index):
                name = next(d for d, (m, _) in self.versions.items() if m.encode() == manifest)
                return f"policy v{self.version(name)}" + (" with index" if index else "")
            case msg.Evidence(first, _):
                signed = next(m for m, _ in self.versions.values() if m.encode() == first)
                return f"evidence against {self.names[signed.publisher]}"
            case msg.RosterNews():
                return "roster"
            case msg.Hello(newest, convicted):
                known = f"newest is v{newest}" if newest >= 0 else "no version"
                halted = "".join(f", {self.names[one]} is convicted" for one in convicted)
                return f"hello, {known}{halted}"
            case msg.Ask(policy, index):
                return f"ask v{self.version(policy)}" + (" with index" if index else "")
            case msg.Have(policy, ranges):
                return f"have {spans(ChunkSet.of_ranges(ranges))} of v{self.version(policy)}"
            case msg.Taken(policy, ranges):
                return f"taken {spans(ChunkSet.of_ranges(ranges))} of v{self.version(policy)}"
            case msg.Skipped(policy, _, stripe, ranges):
                chunks = spans(ChunkSet.of_ranges(ranges))
                return f"skipped {chunks} of v{self.version(policy)}, stripe {stripe}"
            case msg.Want(policy, chunks):
                return f"want {spans(ChunkSet.of(chunks))} of v{self.version(policy)}"
            case msg.Credit() | msg.Blame() | msg.Receipt():
                return self.text_to_origin(item)
        raise ValueError(f"no words for {item!r}")

    def text_to_origin(self, item: msg.Credit | msg.Blame | msg.Receipt) -> str:
        version = self.version(item.policy)
        match item:
            case msg.Credit(_, received, granted):
                return f"credit for v{version}: got {received}, may be given {granted}"
            case msg.Receipt(_, milliseconds, rows):
                came = " ".join(f"{chunks} by stripe {stripe}" for _, stripe, chunks in rows)
                return f"receipt for v{version}: {came}, in {milliseconds / 1000:.2f} s"
            case msg.Blame(_, peer):
                return f"blame {self.names[peer]} for v{version}"

    def states(self) -> Iterator[str]:
        """The state of each node that is another than when it was last told."""
        for machine in self.machines.values():
            downloads = machine.core.downloads if machine.is_alive else ()
            parts = []
            for download in downloads:
                asked = {c: download.requests.get(c) for c in range(download.count)}
                waits = [
                    f"{c} of {self.names[r.peer]}" for c, r in asked.items() if r is not None
                ]
                part = (
                    f"v{self.version(download.manifest.digest)} has {spans(download.verified)} "
                    f"of {download.count}"
                )
                parts.append(part + (f", asked {' and '.join(waits)}" if waits else ""))
            state = "; ".join(parts)
            if machine.is_alive and state and self.said.get(machine.name) != state:
                self.said[machine.name] = state
                yield f"= {machine.name}: {state}"


def is_routine(event: ev.Event) -> bool:
    """Whether mostly nothing comes of it: a tick, a chunk that left or came, and what a peer
    tells of its state."""
    if isinstance(event, ev.Heard):
        return isinstance(event.message, ROUTINE)
    return isinstance(event, ev.Tick | ev.ChunkSent | ev.ChunkCame)


def spans(chunks: ChunkSet) -> str:
    """As in the repr of a `ChunkSet`."""
    return (
        repr(chunks).removeprefix("ChunkSet(").removesuffix(")").replace(" ", ",") or "nothing"
    )
