"""DiLoCo's transcripts: a few members, told by name, and what passes between them by hand.

    members NAME... [anchor NAME]   all of them start
    ready NAME...               these have an update, and their messages arrive at all
    lose NAME...                nothing reaches these any more, nor do they say anything
    return NAME...              it does again
    restart NAME                a new life on what was durable
    reduce NAME...              these have computed what is proposed to them
    only NAME...                from now on messages reach these alone; `all` ends it
    wait SECONDS                beats and deadlines come when they are due
    double NAME                 NAME votes for something else as well, and tells all

Below a step stand the effects but beats, and what a step has changed of each member: the step
it holds, its view, and what it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator

from roles.diloco.core import events as ev, messages as msg
from roles.diloco.core.round import RoundCore, genesis
from tests.transcripts import changes, player
from tests.unit.core_swarm import FakeSigner, fake_verify, peer_named
from tests.unit.diloco_swarm import CONFIG, GRID, RUN, digest, double_vote

STEP = 0.5
"""Seconds between looks while time passes."""


@player("diloco")
class DilocoPlayer:
    """Cores of a few members, and the messages between them, which arrive at once."""

    def __init__(self) -> None:
        self._now = 0.0
        self._cores: dict[str, RoundCore] = {}
        self._kept: dict[str, ev.Keep | None] = {}
        self._tasks: dict[str, ev.Reduce] = {}
        self._outcomes: dict[str, list[bytes]] = {}
        self._lost: set[str] = set()
        self._only: set[str] | None = None
        self._anchor: str | None = None
        self._lines: list[str] = []

    def play(self, command: str, args: list[str]) -> Iterator[str]:
        before, self._lines = self._state(), []
        match command:
            case "members":
                self._begin(args)
            case "ready":
                for name in args:
                    self._feed(name, ev.Trained(self._update(name)))
            case "lose":
                self._lost |= set(args)
            case "return":
                self._lost -= set(args)
            case "only":
                self._only = None if args == ["all"] else set(args)
            case "restart":
                self._start(args[0])
            case "reduce":
                for name in args:
                    self._reduce(name)
            case "wait":
                self._wait(float(args[0]))
            case "double":
                self._double(args[0])
            case _:
                raise ValueError(command)
        yield from self._lines
        yield from changes(before, self._state())

    def _begin(self, args: list[str]) -> None:
        if "anchor" in args:
            self._anchor = args[args.index("anchor") + 1]
            args = args[: args.index("anchor")]
        by_peer = sorted((peer_named(place), place) for place in range(len(args)))
        self._peers = {name: peer for name, (peer, _) in zip(args, by_peer, strict=True)}
        self._names = {peer: name for name, peer in self._peers.items()}
        for name in args:
            self._records = {one: [genesis(RUN, list(self._peers.values()))] for one in args}
            self._kept[name] = None
        for name in args:
            self._start(name)

    def _start(self, name: str) -> None:
        records = self._records[name]
        self._outcomes[name] = []
        self._tasks.pop(name, None)
        self._cores[name] = RoundCore(
            FakeSigner(self._peers[name]), CONFIG, GRID, run=RUN, records=records,
            held=len(records) - 1, kept=self._kept[name], verify=fake_verify,
            may_join=lambda peer: peer in self._names,
            anchor=None if self._anchor is None else self._peers[self._anchor], now=self._now,
        )  # fmt: skip

    def _update(self, name: str) -> msg.Ready:
        core = self._cores[name]
        digests = tuple(digest(name.encode(), bytes([one])) for one in range(GRID.pieces))
        return msg.Ready(
            core.record.step + 1, 0, core.record.digest, 100, 0.0, (1.0,) * GRID.pieces,
            digests, author=core.me,
        )  # fmt: skip

    def _feed(self, name: str, event: ev.Event) -> None:
        for effect in self._cores[name].handle(event, self._now):
            self._carry_out(name, effect)

    def _carry_out(self, name: str, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peer, message):
                self._send(name, self._names[peer], message)
            case ev.Keep():
                self._kept[name] = effect
            case ev.Reduce(view, plan, _, carried, _):
                self._tasks[name] = effect
                summed = " ".join(self._names[peer] for peer in plan.summed)
                again = "what was voted for" if carried else f"the updates of {summed}"
                self._say(name, f"computes {again} in view {view}")
            case ev.Commit(records):
                self._records[name] = [*self._records[name], *records]
                record = records[-1]
                self._tasks.pop(name, None)
                how = "puts" if record.digest in self._outcomes[name] else "fetches and puts"
                signers = " ".join(self._names[peer] for peer, _ in record.signatures)
                self._say(name, f"{how} step {record.step} in force, signed by {signers}")
                self._feed(name, ev.Held(record.step))
            case ev.Convict(fault):
                self._say(name, f"convicts {self._names[fault.culprit]} by two votes")
            case ev.Stalled(heard, members):
                self._say(name, f"hears {heard} of {members}: it stops")
            case ev.Resumed():
                self._say(name, "hears a majority again")

    def _send(self, name: str, target: str, message: msg.RoundMessage) -> None:
        if self._lost & {name, target} or (self._only is not None and target not in self._only):
            return
        said = self._show(message)
        line = f"  {name} to {target}: {said}"
        if said and line not in self._lines:
            self._lines.append(line)
        self._feed(target, ev.Received(self._peers[name], message))

    def _reduce(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is None:
            self._say(name, "has nothing to compute")
            return
        outcome = task.carried or msg.Outcome(
            task.plan, digest(task.plan.id), digest(task.plan.id, b"state")
        )
        self._outcomes[name].append(outcome.digest)
        self._feed(name, ev.Reduced(task.view, outcome))

    def _double(self, name: str) -> None:
        core = self._cores[name]
        assert core.round.vote is not None
        other = double_vote(core, core.round.vote).other
        for target in self._cores:
            if target != name:
                self._send(name, target, other)

    def _wait(self, seconds: float) -> None:
        end = self._now + seconds
        while self._now < end:
            self._now += STEP
            for name, core in self._cores.items():
                if name not in self._lost and core.next_deadline <= self._now:
                    self._feed(name, ev.Tick())

    def _say(self, name: str, text: str) -> None:
        self._lines.append(f"{name} {text}")

    def _show(self, message: msg.RoundMessage) -> str:
        match message:
            case msg.Beat() | msg.Chain():
                return ""
            case msg.Ready():
                return f"ready for step {message.step}"
            case msg.Propose(_, view, plan, carried):
                what = (
                    "again what was voted for"
                    if carried
                    else "sum " + " ".join(self._names[peer] for peer in plan.summed)
                )
                members = " ".join(self._names[peer] for peer in plan.members)
                return f"in view {view} propose: {what}; members are {members}"
            case msg.Vote(_, view, outcome):
                honest = outcome.state_root != msg.NO_DIGEST
                return f"vote in view {view}{'' if honest else ' for something else'}"
            case msg.Promise(_, view, _, vote):
                return f"promise view {view}" + (f", voted in view {vote.view}" if vote else "")
            case msg.Record():
                return f"record of step {message.step}"
            case msg.Doubled():
                return "proof of two votes"
            case _:
                return type(message).__name__

    def _state(self) -> dict[str, str]:
        return {
            name: f"holds step {core.held}, view {core.round.view}"
            + (", waits for a majority" if core.is_stalled else "")
            for name, core in self._cores.items()
        }
