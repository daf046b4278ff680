"""A swarm of `RoundCore`s: lossy links, partitions, deaths, clocks that disagree.

What drivers do is modelled: inner steps and reductions take time, and a reduction fails if a
contributor cannot be reached when it ends. States are digests.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from random import Random

from p2p.errors import BadMessage
from p2p.identity import PeerId
from roles.contract.core.diloco import Codec, RoundConfig
from roles.diloco.core import events as ev
from roles.diloco.core.election import is_majority
from roles.diloco.core.messages import (
    NO_DIGEST,
    Doubled,
    Outcome,
    Ready,
    Record,
    RoundMessage,
    Vote,
    decode_message_untrusted,
    encode_message,
)
from roles.diloco.core.pieces import PieceGrid
from roles.diloco.core.round import RoundCore, genesis
from tests.unit.core_swarm import FakeSigner, Timeline, fake_verify, peer_named

RUN = hashlib.sha256(b"a run").digest()
GRID = PieceGrid.of(1024, Codec.INT8)
CONFIG = RoundConfig(beat=1.0, silence=6.0, grace=8.0, patience=20.0)


def digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"|".join(parts)).digest()


class Machine:
    """A member's disk and clock, which survive its lives."""

    def __init__(self, number: int, offset: float) -> None:
        self.peer = peer_named(number)
        self.offset = offset
        self.records: list[Record] = []
        self.held = -1
        self.kept: ev.Keep | None = None
        self.states: dict[int, bytes] = {}
        self.core: RoundCore | None = None
        self.life = 0
        self.training = -1
        self.outcomes: dict[bytes, Outcome] = {}
        self.stalls = 0
        self.stopped_until = 0.0
        self.seconds = 6.0


class DilocoSwarm(Timeline):
    """Members by number."""

    def __init__(
        self, size: int, seed: int, *, anchor: int | None = None, skew: float = 0.0,
        founders: int | None = None, loss: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.random = Random(seed)
        self.loss = loss
        self.sent = 0
        self.machines = [Machine(n, self.random.uniform(-skew, skew)) for n in range(size)]
        self.by_peer = {machine.peer: machine for machine in self.machines}
        self.anchor = None if anchor is None else self.machines[anchor].peer
        self.founders = [m.peer for m in self.machines[: founders or size]]
        self.cut: set[frozenset[int]] = set()
        self.twist: Callable[[Machine, PeerId, RoundMessage], RoundMessage | None] = (
            lambda machine, peer, message: message
        )
        """What a hostile member sends instead."""
        self.voted: dict[tuple[int, int, bytes], set[PeerId]] = {}
        """Who has made a vote durable for an outcome, by step and view."""
        for machine in self.machines:
            machine.records = [genesis(RUN, self.founders)]
            machine.held = 0
            machine.states[0] = NO_DIGEST

    def start(self, *numbers: int) -> None:
        for number in numbers or range(len(self.machines)):
            machine = self.machines[number]
            machine.life += 1
            machine.training = -1
            machine.outcomes = {}
            machine.core = RoundCore(
                FakeSigner(machine.peer), CONFIG, GRID, run=RUN, records=machine.records,
                held=machine.held, kept=machine.kept, verify=fake_verify,
                may_join=lambda peer: peer in self.by_peer, anchor=self.anchor,
                now=self.now + machine.offset,
            )  # fmt: skip
            self._later(machine, 0.0, lambda m=machine: self._tick(m))
            self._train(machine)

    def kill(self, *numbers: int) -> None:
        for number in numbers:
            self.machines[number].life += 1
            self.machines[number].core = None

    def partition(self, *groups: list[int]) -> None:
        self.cut = {
            frozenset((one, other))
            for a, b in itertools.combinations(groups, 2)
            for one in a
            for other in b
        }

    def heal(self) -> None:
        self.cut = set()

    def feed(self, machine: Machine, event: ev.Event) -> None:
        assert machine.core is not None
        try:
            effects = machine.core.handle(event, self.now + machine.offset)
        except BadMessage as error:
            raise AssertionError(f"an honest message was refused: {error}") from error
        for effect in effects:
            self._carry_out(machine, effect)
        self._train(machine)

    # What a driver does.

    def _later(self, machine: Machine, seconds: float, call: Callable[[], None]) -> None:
        life = machine.life

        def run() -> None:
            if self.now < machine.stopped_until:
                self.at(machine.stopped_until, run)
            elif machine.life == life:
                call()

        self.at(self.now + seconds, run)

    def stop(self, number: int, until: float) -> None:
        """Stop a member's process. It goes on with a tick, before anything that it got."""
        machine = self.machines[number]
        self.at(until, lambda: self.feed(machine, ev.Tick()))
        machine.stopped_until = until

    def _tick(self, machine: Machine) -> None:
        self.feed(machine, ev.Tick())
        assert machine.core is not None
        wait = machine.core.next_deadline - (self.now + machine.offset)
        self._later(machine, max(wait, 1e-3), lambda: self._tick(machine))

    def _train(self, machine: Machine) -> None:
        core = machine.core
        if (
            core is None
            or not core.is_member
            or core.round.ready
            or machine.training == core.held
        ):
            return
        machine.training = core.held
        seconds = machine.seconds * self.random.uniform(0.8, 1.2)
        self._later(machine, seconds, lambda: self._trained(machine))

    def _trained(self, machine: Machine) -> None:
        core = machine.core
        assert core is not None
        if machine.training != core.record.step:
            return
        noise = self.random.randbytes(8)  # a second training of one step gives another update
        digests = tuple(digest(noise, bytes([one])) for one in range(GRID.pieces))
        ready = Ready(
            core.record.step + 1, 0, core.record.digest, 100, 0.0, (1.0,) * GRID.pieces,
            digests, author=machine.peer,
        )  # fmt: skip
        self.feed(machine, ev.Trained(ready))

    def _reaches(self, one: Machine, other: Machine) -> bool:
        pair = frozenset((self.machines.index(one), self.machines.index(other)))
        return other.core is not None and pair not in self.cut

    def _carry_out(self, machine: Machine, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peer, message):
                said = self.twist(machine, peer, message)
                if said is not None:
                    self._send(machine, self.by_peer[peer], said)
            case ev.Keep():
                machine.kept = effect
                if effect.vote is not None:
                    vote = effect.vote
                    place = (vote.step, vote.view, vote.outcome.digest)
                    self.voted.setdefault(place, set()).add(machine.peer)
            case ev.Reduce():
                self._later(
                    machine,
                    self.random.uniform(0.5, 2.0),
                    lambda: self._reduced(machine, effect),
                )
            case ev.Commit(records):
                machine.records = [*machine.records, *records]
                self._later(machine, 0.01, lambda: self._commit(machine, records[-1]))
            case ev.Stalled():
                machine.stalls += 1
            case _:
                pass

    def _send(self, machine: Machine, target: Machine, message: RoundMessage) -> None:
        if self.random.random() < self.loss or not self._reaches(machine, target):
            return
        self.sent += 1
        if self.sent % 8 == 0:  # to encode all would double what a test costs
            message = decode_message_untrusted(encode_message(message))
        delay = self.random.uniform(0.02, 0.2)
        self._later(target, delay, lambda: self._arrive(machine.peer, target, message))

    def _arrive(self, sender: PeerId, target: Machine, message: RoundMessage) -> None:
        if target.core is not None:
            self.feed(target, ev.Received(sender, message))

    def _reduced(self, machine: Machine, effect: ev.Reduce) -> None:
        needed = effect.holders if effect.carried is not None else effect.plan.summed
        others = [self.by_peer[peer] for peer in needed if peer != machine.peer]
        missing = [one for one in others if not self._reaches(machine, one)]
        if effect.carried is not None and len(missing) < len(others):
            missing = []
        if missing:
            event: ev.Event = ev.ReduceFailed(effect.view, tuple(one.peer for one in missing))
        else:
            state = digest(machine.states[machine.held], effect.plan.id)
            outcome = effect.carried or Outcome(effect.plan, digest(effect.plan.id), state)
            machine.outcomes[outcome.digest] = outcome
            event = ev.Reduced(effect.view, outcome)
        self.feed(machine, event)

    def _commit(self, machine: Machine, record: Record) -> None:
        core = machine.core
        assert core is not None
        if core.record.step != record.step or machine.held >= record.step:
            return
        has = record.digest in machine.outcomes
        sources = [
            m for m in self.machines if m.held >= record.step and self._reaches(machine, m)
        ]
        if not has and not sources:
            self._later(machine, 0.5, lambda: self._commit(machine, record))
            return
        machine.held = record.step
        machine.states[record.step] = record.outcome.state_root
        self.feed(machine, ev.Held(record.step))

    # What must hold.

    @property
    def alive(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.core is not None]

    def step(self) -> int:
        """The least of the living."""
        return min(machine.held for machine in self.alive)

    def check(self) -> None:
        """Replicas differ by whole steps only: one record a step, and one state."""
        for step in range(max(len(m.records) for m in self.machines)):
            records = {m.records[step].digest for m in self.machines if len(m.records) > step}
            assert len(records) == 1, f"two records of step {step}"
            states = {m.states[step] for m in self.machines if step in m.states}
            assert len(states) <= 1, f"two states of step {step}"
        self._check_finished()

    def _check_finished(self) -> None:
        """A step that a majority has computed and signed in one view is the one that counts,
        also if they all died then: no such step is lost."""
        history = max((machine.records for machine in self.machines), key=len)
        for (step, view, outcome), voters in self.voted.items():
            if step < len(history) and is_majority(
                voters, history[step - 1].members, self.anchor
            ):
                assert history[step].digest == outcome, f"step {step} of view {view} is lost"

    def proposer(self) -> Machine | None:
        """The one whose plan is being computed by some member."""
        for machine in self.alive:
            assert machine.core is not None
            this = machine.core.round
            if this.proposal is not None and this.vote is None:
                return self.by_peer[this.proposal.author]
        return None


def double_vote(core: RoundCore, vote: Vote) -> Doubled:
    other = Vote(
        vote.step,
        vote.view,
        Outcome(vote.outcome.plan, NO_DIGEST, NO_DIGEST),
        author=vote.author,
    )
    return Doubled(vote, other.signed(RUN, FakeSigner(vote.author)))
