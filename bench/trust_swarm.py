"""A swarm of workers and validators at the level of places: who is checked, learnt from, and
banned.

Theory of operation
-------------------
No network, no model: what is simulated is who commits to what, where the lot falls, and what
follows, by the product's own rules (`Standings`, `Lot`, `Chain`, `Finding`). Time goes in steps
of a policy; each worker makes one window a step, or one in two or three. A place is honest or a
lie; a validator that replays a lie sees it, with the excess over its limit that the kind of lie
has (docs/performance.md, bfloat16). The lot falls after all have committed.

Machines are what an attacker has few of, names what it has at will: a *machine* whose name was
banned goes on under the next one.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from p2p.identity import PeerId
from p2p.shardcast.manifest import PolicyVersion
from proofs.checks import FALSE_REJECTIONS, Reason
from roles.protocol.core.bans import SPREAD
from roles.protocol.core.beacon import Chain
from roles.protocol.core.findings import STRIKES, Finding, Weight
from roles.protocol.core.lots import DELAY, Lot, SignedWindow, Window, parts_of
from roles.protocol.core.standing import MISSES_APART, Standings, least_places
from roles.run.core.trust import TrustTerms, leak
from roles.trainer.core.promises import WorkPromises

STEP: Final = 240.0
"""Seconds of a policy: 15 windows an hour."""
REWARD: Final = (0.387, 0.151)
"""Mean and standard deviation of a place's reward, as measured on the project."""
SCORE: Final = 27 / 192
"""What one check costs beside drawing the place: 27 H100s replay what 200 volunteers draw for
192 that train (docs/simulation-scenarios.md)."""
FAILS: Final = 0.002
"""Chance that an honest machine dies with a drawn place on it; twice that, that it leaves a
window out."""
REFUSES: Final = 0.05
"""Chance that the hostile validator refuses an honest place."""
PATIENCE: Final = 16
"""Places that a validator may leave unanswered before lots pass it over."""
LAG: Final = 2
"""Policies by which work may be old."""
NAMES: Final = 25
"""That a minting machine has: 500 for twenty."""
BFLOAT16: Final = {
    "int4 weights": 7.0,
    "int8 weights": 1.6,
    "best of 4": 8.7,
    "greedy": 7.3,
    "altered token": 14.0,
    "truncated": 1e6,
    "replayed": 1e6,
    "copied proof": 1e6,
    "another prompt": 5.3,
    "a step of 6e-5 older": 2.9,
}
"""How many times beyond its limit a submission of each kind is: strikes, mostly."""
FLOAT32: Final = dict.fromkeys(BFLOAT16, 20.0)
"""The same, where the least of all cheats, an older policy, is so far beyond."""


@dataclass(slots=True)
class Machine:
    """One worker of the swarm, whatever it is called at the moment."""

    kind: str
    number: int
    stride: int = 1
    """Steps that a window takes it."""
    lies: int = 0
    """Places of a window in which it lies, once it does."""
    lie: str = "int4 weights"
    turns_at: float = 0.0
    """Seconds from which on it lies whenever it is proven; 0: at once, and always."""
    names: int = 0
    depth: int = 1
    """Windows that it makes under a policy."""
    windows: int = 0
    """That it has committed under its name."""
    filled: int = 0
    """Places under its last policy."""
    since_miss: int = MISSES_APART

    @property
    def name(self) -> PeerId:
        """What it is called now."""
        text = f"{self.kind} {self.number} {self.names}".encode()
        return PeerId.from_public_key(hashlib.sha256(text).digest())

    def rename(self) -> None:
        """It is somebody else."""
        self.names += 1
        self.windows, self.filled, self.since_miss = 0, 0, MISSES_APART


@dataclass(slots=True)
class Sums:
    """What became of the work of one kind of machine."""

    made: int = 0
    made_reward: float = 0.0
    learnt: int = 0
    learnt_reward: float = 0.0
    lies: int = 0
    """Committed to in standing; of those `drawn` were drawn, and `leaked` were learnt from."""
    drawn: int = 0
    leaked: int = 0
    left_out: int = 0
    banned: set[PeerId] = field(default_factory=set)
    convicted: set[int] = field(default_factory=set)
    """Numbers of machines of which a name was banned; `found`: or that were seen to lie."""
    found: set[int] = field(default_factory=set)
    fallen: int = 0
    """Times that standing ended."""

    @property
    def gain(self) -> float:
        """By how much what is learnt from earns more than so many places of all that was made,
        as a part of all that was made."""
        mean = self.made_reward / self.made
        return (self.learnt_reward - mean * self.learnt) / self.made_reward

    @property
    def income(self) -> float:
        """Reward of what is learnt from, for each place that was made."""
        return self.learnt_reward / self.made


@dataclass(slots=True)
class Judge:
    """A validator."""

    name: PeerId
    kind: str
    unanswered: int = 0
    strikes: int = 0
    convicted: bool = False

    def note(self, weight: Weight) -> None:
        """The trainer's engine says otherwise."""
        self.strikes += weight is Weight.STRIKE
        self.convicted |= weight is Weight.LIE or self.strikes >= STRIKES

    @property
    def is_asked(self) -> bool:
        """Whether lots fall on it."""
        return not self.convicted and self.unanswered < PATIENCE


class TrustSwarm:
    """All machines and validators, a trainer that has the standings, and what came of it."""

    def __init__(
        self,
        terms: TrustTerms,
        machines: list[Machine],
        validators: list[str],
        excess: Mapping[str, float],
        seed: int,
    ) -> None:
        """``validators`` are kinds: ``honest``, ``hostile`` or ``lazy``; ``excess`` is
        `FLOAT32` or `BFLOAT16`."""
        self._excess = excess
        self.terms = terms
        self.machines = machines
        self.standings = Standings(terms)
        self._promises = WorkPromises(self.standings, LAG)
        self.judges = {
            name: Judge(name, kind)
            for number, kind in enumerate(validators)
            for name in [Machine(f"validator {kind}", number).name]
        }
        self.sums: defaultdict[str, Sums] = defaultdict(Sums)
        self.hours: list[Counter[str]] = []
        """By hour: places drawn by workers, checks by validators and by the trainer."""
        self.window_bytes = 0
        """Of the largest window, signed."""
        self._dice = np.random.default_rng(seed)
        chain = Chain(hashlib.sha256(f"beacon {seed}".encode()).digest())
        self._link = functools.cache(chain.link)
        self._strikes: defaultdict[PeerId, list[PolicyVersion]] = defaultdict(list)
        self._banned: set[PeerId] = set()

    @property
    def is_bfloat16(self) -> bool:
        """Whether most lies are strikes: three of them under three policies ban."""
        return self._excess is BFLOAT16

    @property
    def stated_leak(self) -> float:
        """What the run says for its turncoats' share of the speed of all that can be learnt
        from: a worker that lies from the start, always selects or changes its name cannot."""
        speed: defaultdict[bool, float] = defaultdict(float)
        for one in self.machines:
            if one.kind in ("honest", "selecting", "turncoat", "grinding"):
                speed[one.turns_at > 0] += 1 / one.stride
        return leak(self.terms, speed[True] / sum(speed.values()))

    def run(self, hours: float) -> None:
        """From the first policy on."""
        for step in range(round(hours * 3600 / STEP)):
            now = step * STEP
            if len(self.hours) <= now // 3600:
                self.hours.append(Counter())
            self._promises.publish(PolicyVersion(step), (0, step + 1), now)
            self._promises.close(now, now, lambda *_: True, lambda *_: True)
            committed = [
                (machine, *made)
                for machine in self.machines
                if (step + machine.number) % machine.stride == 0
                for made in self._commit(machine, step, now)
            ]
            for machine, window, lies, rewards in committed:
                self._settle(machine, window, lies, rewards, now)

    # -- workers -------------------------------------------------------------------------

    def _commit(
        self, machine: Machine, step: int, now: float
    ) -> Iterator[tuple[Window, frozenset[int], float]]:
        """The window that a machine makes under this policy, if it hands it in."""
        size, sums = self.terms.window, self.sums[machine.kind]
        if machine.name in self._banned:
            machine.rename()
        name = machine.name
        proven = self.standings.is_proven(name, now)
        rewards = self._dice.normal(*REWARD, size * machine.depth)
        sums.made += len(rewards)
        sums.made_reward += float(rewards.sum())
        self.hours[-1]["drawn"] += len(rewards)
        if self._leaves_out(machine, float(rewards.mean()), proven=proven):
            sums.left_out += 1
            machine.since_miss = 0
            return
        is_lying = machine.lies and now >= machine.turns_at and (proven or not machine.turns_at)
        lies = frozenset(
            map(int, self._dice.choice(size, machine.lies, replace=False)) if is_lying else ()
        )
        sums.lies += len(lies) * proven
        machine.filled = self._ends(machine, rewards, proven=proven)
        machine.windows += 1
        machine.since_miss += 1
        for first in range(0, machine.filled, size):
            window = self._window(machine, step, 0, first)
            if machine.kind == "grinding" and lies:
                # It prefers the form of which the newest link it knows would draw the fewest.
                forms = [self._window(machine, step, form) for form in range(16)]
                window = min(forms, key=lambda one: len(lies.intersection(self._drawn(one, 0))))
            self._promises.note(window)
            places = slice(first, min(first + size, machine.filled))
            yield window, lies, float(rewards[places].sum())

    def _ends(self, machine: Machine, rewards: np.ndarray, *, proven: bool) -> int:
        """How many of the places that it has drawn a machine fills."""
        if machine.kind != "ending" or not proven:
            return len(rewards)
        least = least_places(min(machine.filled, len(rewards)))
        beyond = np.cumsum(rewards - REWARD[0])[least - 1 :]
        return least + int(beyond.argmax())

    def _leaves_out(self, machine: Machine, mean: float, *, proven: bool) -> bool:
        places = self.terms.window * machine.depth
        sigma = (mean - REWARD[0]) / (REWARD[1] / places**0.5)
        match machine.kind:
            case "selecting":  # as often as is forgiven, and then only the worst
                return proven and machine.since_miss >= MISSES_APART and sigma < -1.5
            case "selecting all":
                return bool(sigma < 0)
            case "minting":  # goes on with the best first window of five names
                if machine.names == NAMES - 1:
                    return False
                if machine.windows == 0 and sigma < 0.84:
                    machine.rename()
                    return True
                if machine.windows == 6:  # time for the next name
                    machine.rename()
                return False
            case _:
                return bool(self._dice.random() < 2 * FAILS)

    def _window(self, machine: Machine, step: int, form: int, first: int = 0) -> Window:
        name = machine.name
        policy = hashlib.sha256(f"policy {step}".encode()).digest()
        contents = tuple(
            hashlib.sha256(name + policy + bytes([place, form])).digest()
            for place in range(first, min(first + self.terms.window, machine.filled))
        )
        return Window(
            *(b"r" * 32, name, PolicyVersion(step), policy, first, contents, 0, policy),
            *(0, step + 1, step + machine.stride),
        )

    def _drawn(self, window: Window, delay: int) -> list[int]:
        return Lot(window, self._link(window.link + delay)).drawn(parts_of(self.terms.share))

    # -- validators and trainer ----------------------------------------------------------

    def _settle(
        self, machine: Machine, window: Window, lies: frozenset[int], rewards: float, now: float
    ) -> None:
        name, sums = window.node, self.sums[machine.kind]
        self.window_bytes = max(
            self.window_bytes, len(SignedWindow(window, bytes(64)).to_bytes())
        )
        proven = self.standings.is_proven(name, now)
        share = parts_of(self.standings.share_of(name, now))
        lot = Lot(window, self._link(window.link + DELAY))
        drawn = lot.drawn(share)
        sums.drawn += len(lies.intersection(drawn)) * proven
        findings: list[Finding] = []
        for place in drawn:
            found = self._judge(lot, place, self._excess[machine.lie] if place in lies else 0.0)
            findings += [found] if found else []
            if len(findings) == STRIKES:
                break
        came = machine.lies or self._dice.random() >= FAILS
        if findings or not came:
            sums.fallen += proven
            self.standings.note_rejected(name)
            sums.found |= {machine.number} if findings else set()
            if self._is_banned(window, findings):
                sums.banned.add(name)
                sums.convicted.add(machine.number)
            return
        self.standings.note_accepted(name, len(window.contents), now)
        if proven:
            sums.learnt += len(window.contents)
            sums.learnt_reward += rewards
            sums.leaked += len(lies)

    def _judge(self, lot: Lot, place: int, excess: float) -> Finding | None:
        """What becomes of one drawn place: what all agree on, or what the trainer finds."""
        found = self._replay(excess)
        said: dict[PeerId, bool] = {}
        asked = [name for name, one in self.judges.items() if one.is_asked]
        for name in lot.judges(place, asked, len(asked)):
            judge = self.judges[name]
            if judge.kind == "lazy":
                judge.unanswered += 1
                continue
            if judge.kind == "honest":
                self.hours[-1]["checked"] += 1
                said[name] = found is not None
            else:
                said[name] = not excess and bool(self._dice.random() < REFUSES)
            if len(said) == self.terms.validators:
                break
        if len(set(said.values())) > 1:  # the trainer's engine decides
            self.hours[-1]["replayed"] += 1
            weight = found.weight if found else Weight.STRIKE
            for name, refused in said.items():
                if refused != (found is not None):
                    self.judges[name].note(weight)
            return found
        return found if any(said.values()) else None

    def _replay(self, excess: float) -> Finding | None:
        """Honest work exceeds a limit as seldom as is promised, and by little."""
        if not excess and self._dice.random() < FALSE_REJECTIONS:
            excess = float(self._dice.uniform(1.0, 1.4))
        if not excess:
            return None
        reason = Reason.MALFORMED_PROOF if excess >= 1e6 else Reason.MANTISSA_MEAN
        return Finding(reason.value, excess, 1.0)

    def _is_banned(self, window: Window, findings: list[Finding]) -> bool:
        """One lie beyond doubt, or strikes enough under policies that follow on each other
        (`roles.protocol.core.bans.convicts`)."""
        name, weights = window.node, [one.weight for one in findings]
        strikes = self._strikes[name]
        strikes += [window.version] * weights.count(Weight.STRIKE)
        lately = [one for one in strikes if one >= window.version - SPREAD]
        if Weight.LIE in weights or len(lately) >= STRIKES:
            self._banned.add(name)
        return name in self._banned
