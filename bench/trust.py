"""``python -m bench trust [--json FILE] [--seeds N] [--hours 8]``: what trust is worth.

Theory of operation
-------------------
A swarm lives for some hours at the level of places, with the product's own gate
(`roles.trainer.core.gate`): no network, no model, and no signatures. Each machine commits one
window a step; a place is honest or a lie, which whoever replays it sees at 20 times its limit,
the least of all cheats in float32. Machines are what an
attacker has few of, names what it has at will: one whose name was banned, or has fallen, goes
on under the next.

| kind | what it does |
|---|---|
| honest | works; now and then a window is lost, or rejected without cause |
| visitor | honest, and comes back under a new name every hour |
| fresh cheat | lies in every place, under a new name whenever it is banned |
| turncoat | lies in some places once it is in standing |
| wrong claim | says of groups that earn little that all earn the same |
| junk | fills groups that claim to be alike with junk, in windows of 16 places, or of one |
| skipping | the same, and keeps back what the dice want |

Validators are honest, stamping (accepts all, sends what is asked for), mute (accepts all, sends
nothing when audited), refusing (one honest place in twenty, at three times its limit) or
silent. *Income* counts places that are learnt from, or that nobody wants and whose window
stood, and on top the share of their cost that lies in them saved, of all places made.
Exit status 1 if a line does not hold.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

import numpy as np

from bench.report import Report
from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import FALSE_REJECTIONS, Reason, Verdict
from roles.contract.core.trust import TrustTerms
from roles.protocol.core.answer import Refused
from roles.protocol.core.findings import Finding, Weight
from roles.protocol.core.verdict import SignedVerdict
from roles.protocol.core.window import Claim, SignedWindow, Submission, Window, content_digest
from roles.trainer.core.gate import Consequence, Gate, Situation, Wish

STEP: Final = 240.0
"""Seconds of a version: 15 windows an hour."""
GROUPS: Final = 8
SPREAD: Final = 0.25
"""Groups whose completions earn different rewards."""
REPLAY: Final = 27 / 192
"""Cost of a replay against drawing, measured on CPUs; GPUs need less."""
FAILS: Final = 0.002
"""Windows that a machine loses once they are committed."""
LAG: Final = 2
FALSE: Final = 3.0
"""Distance that a refuser alleges, in limits: a strike, where it is found last."""
TRUST: Final = TrustTerms(share=0.05, probation=32, window=16)
RUN: Final = bytes(32)

KINDS: Final = (
    *(("honest", 60), ("visitor", 20), ("fresh cheat", 8), ("turncoat", 6)),
    *(("wrong claim", 4), ("junk", 4), ("junk by one", 2), ("skipping", 2)),
)
LIARS: Final = frozenset(kind for kind, _ in KINDS) - {"honest", "visitor"}
SAVES: Final = {
    **dict.fromkeys(("fresh cheat", "turncoat"), 0.75),  # int4 weights
    **dict.fromkeys(("junk", "junk by one", "skipping"), 1.0),
}
"""Saving of each lie, as a share of the cost of its place."""
COLUMNS: Final = (
    *("made", "learnt", "unwanted", "names", "banned", "fallen", "forgiven", "income"),
)
JUDGES: Final = ("honest", "honest", "honest", "stamping", "mute", "refusing", "silent")


def peer(*words: object) -> PeerId:
    """Return the name that belongs to these words."""
    return PeerId.from_public_key(sha256(repr(words).encode()).digest())


def content(name: PeerId, version: int, index: int) -> bytes:
    """Return placeholder content for a place; nobody reads it."""
    return name.digest + version.to_bytes(4, "big") + index.to_bytes(4, "big")


@dataclass(slots=True)
class Machine:
    """A worker machine, under changing names."""

    kind: str
    number: int
    names: int = 0
    place: int = 0
    """Places under the present version."""

    @property
    def name(self) -> PeerId:
        return peer(self.kind, self.number, self.names)

    def rename(self) -> None:
        self.names, self.place = self.names + 1, 0


@dataclass(slots=True)
class Judge:
    """A validator."""

    kind: str
    name: PeerId
    lies: int = 0
    """Places of liars that it accepted, and honest ones that it refused, until convicted."""
    verdicts: int = 0
    """Verdicts that the gate took until it was convicted."""
    is_convicted: bool = False


@dataclass(slots=True)
class Sums:
    """Places of one kind of machine, by outcome."""

    made: int = 0
    learnt: int = 0
    unwanted: int = 0
    """Unwanted places in windows without a lie."""
    saved: float = 0.0
    leaked: int = 0
    """Lies in groups that were learnt from."""
    fallen: int = 0
    forgiven: int = 0
    banned: set[PeerId] = field(default_factory=set)

    @property
    def income(self) -> float:
        """Places credited or saved, of all made."""
        return (self.learnt + self.unwanted + self.saved) / max(self.made, 1)


@dataclass(slots=True)
class Drawn:
    """A window with its machine's hidden facts: a row for each place, a column for each
    group.
    """

    machine: Machine
    window: Window
    spread: np.ndarray
    lies: np.ndarray
    claims: np.ndarray

    def has_lie(self, index: int) -> bool:
        """Return True if a replay of the whole place shows a lie."""
        return bool(self.lies[index - self.window.first].any())


class Swarm:
    """All machines and validators, the gate, and the results."""

    def __init__(self, seed: int) -> None:
        self.machines = [Machine(kind, n) for kind, count in KINDS for n in range(count)]
        judges = [Judge(kind, peer("judge", n)) for n, kind in enumerate(JUDGES)]
        self.judges = {one.name: one for one in judges}
        self.sums = {kind: Sums() for kind, _ in KINDS}
        self.hours: list[Counter[str]] = []
        """Counts of each hour, in places: drawn and replayed."""
        self.wasted = 0
        """Places of liars in standing that the trainer scored for nothing."""
        self.served = 0
        """Places of liars that validators judged before."""
        self.gate = Gate(peer("trainer"), sha256(f"secret {seed}".encode()).digest())
        self._dice = np.random.default_rng(seed)
        self._kinds: dict[PeerId, str] = {}

    def run(self, hours: float) -> None:
        """Let the swarm live from version 0 on."""
        for step in range(round(hours * 3600 / STEP)):
            now = self.situation(step)
            if len(self.hours) <= now.served // 3600:
                self.hours.append(Counter())
            for machine in self.machines:
                machine.place = 0
                if machine.kind == "visitor" and (step + machine.number) % 15 == 0:
                    machine.rename()
                is_by_one = machine.kind in ("junk by one", "skipping")
                for size in 16 * (1,) if is_by_one else (16,):
                    self._work(machine, size, now)
            for found in self.gate.expire(now):
                if isinstance(found, Consequence):
                    self._note(found)
                else:
                    self.judges[found.validator].is_convicted |= found.is_convicted

    def situation(self, step: int) -> Situation:
        """Return the gate's situation at a step."""
        return Situation(
            served=step * STEP,
            wall=step * STEP,
            newest=PolicyVersion(step),
            terms=RUN,
            validators=tuple(self.judges),
            trust=TRUST,
            lag=LAG,
        )

    def is_in_standing(self, machine: Machine, now: Situation) -> bool:
        """Return True if the present name of ``machine`` is."""
        return self.gate.standing(machine.name, now, is_listed=False).is_in_standing

    # -- workers -------------------------------------------------------------------------

    def _work(self, machine: Machine, size: int, now: Situation) -> None:
        """Draw a window, commit to it, and deliver the wanted content."""
        drawn = self._draw(machine, size, now)
        window, sums = drawn.window, self.sums[machine.kind]
        self._kinds[window.node] = machine.kind
        given = self.gate.commit(SignedWindow(window, bytes(64)), now, is_listed=False)
        if isinstance(given, Refused):
            if not given.retry:  # banned
                machine.rename()
            return
        machine.place += size
        sums.made += size
        self.hours[-1]["drawn"] += size
        fallen = sums.fallen
        is_lost = self._dice.random() < FAILS * size / 16
        for index in given.wanted if not is_lost else ():
            if given.scorer not in self.judges:
                self._score(drawn, index, now)
            else:
                self._judge(drawn, index, self.judges[given.scorer], now)
        if not given.is_newcomer and sums.fallen == fallen:
            sums.unwanted += size - len(given.wanted)
            for index in set(window.places) - set(given.wanted):
                self._save(drawn, index)

    def _draw(self, machine: Machine, size: int, now: Situation) -> Drawn:
        spread = self._dice.random((size, GROUPS)) < SPREAD
        lies = np.zeros_like(spread)
        claims = spread.copy()
        if machine.kind == "fresh cheat":
            lies[:] = True
        elif machine.kind in LIARS and self.is_in_standing(machine, now):
            if machine.kind == "turncoat":
                lies[: (1, 4, 16)[machine.number % 3]] = True
            elif machine.kind == "wrong claim":
                claims &= self._dice.random(claims.shape) < 0.75
            else:
                spread[:: 1 + machine.number % 2] = False  # all places, or every other
                claims = spread.copy()
                lies = ~spread
        places = range(machine.place, machine.place + size)
        window = Window(
            *(RUN, RUN, machine.name, now.newest, RUN, machine.place),
            tuple(content_digest(content(machine.name, now.newest, index)) for index in places),
            bytes(np.where(claims, Claim.SPREAD, Claim.ALIKE).astype(np.uint8).ravel()),
        )
        return Drawn(machine, window, spread, lies, claims)

    def _save(self, drawn: Drawn, index: int) -> None:
        """Add what the lies in a credited place saved."""
        lies = float(drawn.lies[index - drawn.window.first].mean())
        self.sums[drawn.machine.kind].saved += SAVES.get(drawn.machine.kind, 0.0) * lies

    def _note(self, found: Consequence | None) -> None:
        if found is not None:
            sums = self.sums[self._kinds[found.node]]
            sums.fallen += found.is_newcomer_again
            sums.forgiven += found.is_forgiven
            if found.banned_until is not None:
                sums.banned.add(found.node)

    # -- trainer and validators ----------------------------------------------------------

    def _score(self, drawn: Drawn, index: int, now: Situation) -> None:
        """Let the trainer's scorer replay a place of a name in standing."""
        row = index - drawn.window.first
        commitment, sums = drawn.window.commitment(index), self.sums[drawn.machine.kind]
        if isinstance(self.gate.expects(commitment, now), Refused):
            return
        if drawn.machine.kind == "skipping" and not drawn.claims[row].any():
            self._note(self.gate.inconclusive(commitment, now))
            return
        spread = drawn.spread[row]
        replayed = self.gate.groups_to_replay(drawn.window, index, spread.tolist(), now)
        self.hours[-1]["scored"] += len(replayed)
        if drawn.lies[row][list(replayed)].any():
            self.wasted += 1
            self._note(self.gate.lied(commitment, Weight.LIE, now))
        elif not drawn.has_lie(index) and self._dice.random() < FALSE_REJECTIONS:
            self._note(self.gate.lied(commitment, Weight.BORDERLINE, now))
        elif (drawn.claims[row] != spread).any():
            self.wasted += 1
            self._note(self.gate.wrong_claim(commitment, now))
        elif self.gate.stood(commitment, now):
            sums.learnt += 1
            self._save(drawn, index)
            sums.leaked += int((drawn.lies[row] & spread).sum())

    def _judge(self, drawn: Drawn, index: int, judge: Judge, now: Situation) -> None:
        """Let a validator judge a newcomer's place, and the worker contest that."""
        has_lie = drawn.has_lie(index)
        self.served += drawn.machine.kind in LIARS and drawn.machine.kind != "fresh cheat"
        excess = 0.0
        if judge.kind == "silent":
            return
        if judge.kind in ("honest", "refusing"):
            self.hours[-1]["judged"] += GROUPS
            if has_lie:
                excess = 20.0
            elif self._dice.random() < FALSE_REJECTIONS:
                excess = 1.2
            elif judge.kind == "refusing" and self._dice.random() < 0.05:
                excess = FALSE
        verdict = SignedVerdict(
            validator=judge.name,
            commitment=drawn.window.commitment(index),
            verdict=Verdict.REJECTED if excess else Verdict.ACCEPTED,
            reason=Reason.MANTISSA_MEAN.value,
            statistic=excess,
            limit=1.0,
            rewards=(),
        )
        if not judge.is_convicted:
            judge.verdicts += 1
            judge.lies += has_lie != bool(excess)
        network = f"{drawn.machine.kind} {drawn.machine.number % 8}"
        wish = self.gate.verdict(verdict, now, network=network)
        if wish is Wish.SEND and judge.kind == "mute":
            return
        if wish is Wish.TAKE and excess:
            wish = self.gate.contest(verdict, now, network=network)
        if wish is not Wish.SEND:
            return
        self.hours[-1]["repeated"] += GROUPS
        finding = Finding(Reason.MANTISSA_MEAN.value, 20.0, 1.0) if has_lie else None
        self.gate.came(verdict.commitment)
        filled = content(drawn.window.node, now.newest, index)
        submission = Submission(SignedWindow(drawn.window, bytes(64)), index, filled)
        found = self.gate.audited(verdict, submission, finding, now, lambda *_: True)
        judge.is_convicted |= found.is_convicted
        self._note(found.worker)


def share(hours: Sequence[Counter[str]], key: str) -> float:
    """Return the cost of replays for ``key``, as a share of the cost of drawing."""
    spent = sum(one[key] for one in hours) / GROUPS * REPLAY
    return spent / sum(one["drawn"] for one in hours)


@dataclass(frozen=True, slots=True)
class Line:
    """A figure with its limit."""

    name: str
    value: float
    limit: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        """Return True if the line keeps its limit."""
        return self.value <= self.limit

    def __str__(self) -> str:
        def text(number: float) -> str:
            return f"{number:.1%}" if self.unit == "%" else f"{number:,.0f}{self.unit}"

        sign = "  " if self.holds else "! "
        return f"{sign}{self.name:<62} {text(self.value):>8}   at most {text(self.limit)}"


def lines(one: Swarm) -> Iterator[Line]:
    """Yield the figures of a swarm, with their limits."""
    sums, now = one.sums, one.situation(0)
    yield Line(
        "lies that one submission shows, learnt from", sum(s.leaked for s in sums.values()), 0
    )
    innocent = sum(len(s.banned) for kind, s in sums.items() if kind not in LIARS)
    yield Line("honest names banned", innocent, 0)
    best = max(sums[kind].income for kind in LIARS)
    yield Line("best income of a kind of liar", best, sums["honest"].income, "%")
    later = one.hours[1:] or one.hours
    yield Line(
        "trainer's scoring of names in standing, of drawing", share(later, "scored"), 0.05, "%"
    )
    yield Line("trainer's audits and repeats, of drawing", share(later, "repeated"), 0.01, "%")
    yield Line(
        "validators' scoring in the first hour", share(one.hours[:1], "judged"), REPLAY, "%"
    )
    yield Line("validators' scoring later", share(later, "judged"), 0.05, "%")
    wasted = one.wasted / max(one.served, 1)
    yield Line("scores of the trainer wasted, a liar's place of probation", wasted, 1 / 32, "%")
    judges = one.judges.values()
    free = sum(not j.is_convicted for j in judges if j.kind in ("stamping", "mute", "refusing"))
    yield Line("lying validators not convicted", free, 0)
    wronged = sum(j.is_convicted for j in judges if j.kind in ("honest", "silent"))
    yield Line("honest or silent validators convicted", wronged, 0)
    outside = sum(m.kind == "honest" and not one.is_in_standing(m, now) for m in one.machines)
    yield Line("honest machines of 60 not in standing at the end", outside, 3)


def table(one: Swarm) -> str:
    """Return the fates of places and names by kind of machine."""
    rows = [f"{'':<12}" + "".join(f"{name:>10}" for name in COLUMNS)]
    for kind, of in one.sums.items():
        names = sum(1 + each.names for each in one.machines if each.kind == kind)
        counts = (
            of.made,
            of.learnt,
            of.unwanted,
            names,
            len(of.banned),
            of.fallen,
            of.forgiven,
        )
        row = f"{kind:<12}" + "".join(f"{count:>10,}" for count in counts)
        rows.append(f"{row}{of.income:>10.1%}")
    for judge in one.judges.values():
        said = (
            f"{judge.kind + ' validator':<22}{judge.verdicts:>8,} verdicts{judge.lies:>6,} lies"
        )
        rows.append(said + (" until convicted" if judge.is_convicted else ""))
    return "\n".join(rows)


def run(args: list[str]) -> int:
    """Run the bench; 1 if a line does not hold for a seed."""
    parser = argparse.ArgumentParser(prog="python -m bench trust")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(1, 11)])
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(args)
    report, failed = Report("trust"), 0
    figures: dict[str, list[float]] = {}
    for seed in options.seeds:
        one = Swarm(seed)
        one.run(options.hours)
        print(f"\nseed {seed}, {options.hours:g} hours")
        print(table(one))
        for line in lines(one):
            print(line)
            failed += not line.holds
            figures.setdefault(line.name, []).append(line.value)
            report.add(f"seed {seed}", "shoal", line.name, line.unit, [line.value])
        for kind, of in one.sums.items():
            figures.setdefault(f"income of {kind}", []).append(of.income)
        for judge in one.judges.values():
            if judge.is_convicted:
                figures.setdefault(f"lies until {judge.kind} is convicted", []).append(
                    judge.lies
                )
                figures.setdefault(f"verdicts until {judge.kind} is convicted", []).append(
                    judge.verdicts
                )
    print(f"\n{len(options.seeds)} seeds: mean, least, most")
    for name, values in figures.items():
        mean = statistics.fmean(values)
        print(f"  {name:<62} {mean:>10,.3f} {min(values):>10,.3f} {max(values):>10,.3f}")
        report.add("all seeds", "shoal", name, "", values)
    report.write(options.json)
    return 1 if failed else 0
