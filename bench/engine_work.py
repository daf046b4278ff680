"""Ways to work for ``bench engines``, and a store of each way's groups and evidence.

A piece is a batch of one way. Both its groups and their evidence are files, written as soon as
they are there, so that a bench that was stopped goes on, what one engine wrote can be read by
another, and several processes can share the work.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from enum import Enum
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any, Final

import msgpack

from bench.falsified import FALSIFIED, Recorded
from proofs.checks import Evidence
from roles.calibrate.measure import likeliest
from roles.calibrate.weights import Change, low_rank, rewrite, to_fp8, to_int4, to_int8
from roles.engines import codec
from roles.engines.base import Group, GroupTask, Sampling
from roles.engines.config import EngineConfig
from roles.engines.worker import LocalEngine, draw_all, make_engine
from roles.envs.text import Message
from roles.models.tokenizer import Tokenizer

SIZE: Final = 16
"""Answers of a group."""
BATCH: Final = 4
"""Groups drawn together: 64 rows. A GPU wants more."""
TOPICS: Final = (
    "the sea", "how bread is baked", "a lost dog", "the moon", "a train ride", "rain",
    "an old clock", "prime numbers", "tea", "birds in winter", "a school", "soup",
)  # fmt: skip
ADAPTER: Final = "adapter 1e-3"
WEIGHTS_MADE: Final[dict[str, Change]] = {
    "int8": to_int8,
    "fp8": to_fp8,
    "int4": to_int4,
    ADAPTER: low_rank(1e-3),
}
"""Variants of the claimed policy's weights, by name; other names are folders."""
FOREIGN: Final = "int4 weights"
"""The way whose tokens are those of another model."""


class Questions(Enum):
    """Questions of a benchmark."""

    TOPICS = "topics"
    """Open questions, to which answers are as long as they may be."""
    ADDITION = "addition"
    """Sums of two-digit numbers, with the beginning of the answer: a few tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to work: the claim, and the work that is done instead."""

    name: str
    groups: int
    claims: str = ""
    """The policy; empty: the model's own."""
    writes: str = ""
    """Name of the policy that is drawn from; empty: the claimed one."""
    temperature: float = 1.0
    tries: int = 1
    """Draws of which the likeliest answer is taken, the first by the seed that is due."""
    shift: int = 0
    """Answers so many tasks further on."""
    salt: str = ""
    """Salt of the seeds: empty for the prescribed ones."""
    falsifies: str = ""
    """Change of honest work (`FALSIFIED`), instead of drawing."""
    is_honest: bool = True
    batch: int = BATCH
    """Number of groups in a piece."""

    @property
    def pieces(self) -> range:
        """Numbers of the pieces of this way."""
        return range(-(-self.groups // self.batch))

    def numbers(self, piece: int) -> range:
        """Return the numbers of the groups in a piece."""
        return range(piece * self.batch, min(self.groups, (piece + 1) * self.batch))


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one of several processes: every n-th piece."""

    mine: int = 0
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Share:
        """Return the share with this text: ``3/12`` is the fourth of twelve."""
        mine, of = map(int, text.split("/"))
        if not 0 <= mine < of:
            raise ValueError(f"{text} is no share: 0/12 to 11/12 are those of twelve")
        return cls(mine, of)

    def take(self, ways: Sequence[Way]) -> Iterator[tuple[Way, int]]:
        """Yield all pieces of this share, the first pieces of all ways before the second
        pieces.

        A stopped benchmark then has some of each way.
        """
        jobs = [(way, piece) for way in ways for piece in way.pieces]
        jobs.sort(key=lambda job: job[1])
        return iter(jobs[self.mine :: self.of])


def make_tasks(
    folder: Path, questions: Questions, numbers: Iterable[int], salt: str = "", shift: int = 0
) -> list[GroupTask]:
    """Questions in the model's chat template, with 16 seeds each."""
    tokenizer = Tokenizer.open(folder)
    return [
        GroupTask(
            number,
            _prompt(tokenizer, questions, number + shift),
            tuple(
                hashlib.sha256(f"{salt} {number} {slot}".encode()).digest()
                for slot in range(SIZE)
            ),
        )
        for number in numbers
    ]


def _prompt(tokenizer: Tokenizer, questions: Questions, number: int) -> tuple[int, ...]:
    if questions is Questions.TOPICS:
        text = f"Tell me {number + 3} things about {TOPICS[number % 12]}."
        return tokenizer.chat([Message("user", text)])
    rng = Random(number)
    terms = f"{rng.randint(10, 99)} + {rng.randint(10, 99)}"
    return tokenizer.chat([Message("user", f"What is {terms}?")], f"{terms} =")


class Store:
    """Files of the groups that one engine wrote, and of the other engine's evidence about
    them."""

    def __init__(self, folder: Path, kind: str, reader: str) -> None:
        self.weights = folder / "weights"
        self._written = folder / kind / "written"
        self._seen = folder / kind / f"seen-by-{reader}"
        for path in (self.weights, self._written, self._seen):
            path.mkdir(parents=True, exist_ok=True)

    def groups(self, way: Way, piece: int) -> list[Group] | None:
        """Return the groups that the writer drew for ``piece``, or None if it has not yet."""
        value = _read(self._written / _name(way, piece))
        return value and [codec.decode_group(group) for group in value[2]]

    def keep_groups(
        self, way: Way, piece: int, groups: Sequence[Group], seconds: float
    ) -> None:
        """Store groups with the CPU seconds of writing."""
        tokens = sum(len(one.tokens) for group in groups for one in group.completions)
        value = (seconds, tokens, [codec.encode_group(group) for group in groups])
        _write(self._written / _name(way, piece), value)

    def written(self, way: Way) -> tuple[int, float]:
        """Tokens, and CPU seconds for them."""
        found = [_read(self._written / _name(way, piece)) for piece in way.pieces]
        there = [value for value in found if value]
        return sum(value[1] for value in there), sum(value[0] for value in there)

    def is_seen(self, way: Way, piece: int) -> bool:
        """Return True if it was read."""
        return (self._seen / _name(way, piece)).exists()

    def keep_evidence(self, way: Way, piece: int, evidence: Sequence[Evidence]) -> None:
        """Store the reader's evidence."""
        _write(self._seen / _name(way, piece), [astuple(one) for one in evidence])

    def evidence(self, way: Way) -> list[Evidence]:
        """Return the evidence of all pieces that were read."""
        found = (_read(self._seen / _name(way, piece)) for piece in way.pieces)
        return [Evidence(*one) for value in found for one in value or ()]


def _name(way: Way, piece: int) -> str:
    return f"{way.name.replace(' ', '-')}.{piece:03}"


def _read(path: Path) -> Any:
    return msgpack.unpackb(path.read_bytes(), use_list=False) if path.exists() else None


def _write(path: Path, value: object) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(msgpack.packb(value))
    unfinished.replace(path)


@dataclass(frozen=True, slots=True)
class Side:
    """An engine that writes or reads."""

    kind: str
    device: str


class Workshop:
    """Both engines, each with the policy that it loaded last."""

    def __init__(
        self,
        config: EngineConfig,
        sides: tuple[Side, Side],
        sampling: Sampling,
        model: Path,
        policies: Path | None,
        store: Store,
    ) -> None:
        """Prepare both engines; ``sides`` are the writer and the reader."""
        self._config = config
        self._writer, self._reader = sides
        self._sampling = sampling
        self._model = model
        self._policies = policies
        self._store = store
        self._engines = dict[Side, LocalEngine]()
        self._loaded = dict[Side, Path]()

    def advance(
        self, ways: Sequence[Way], questions: Questions, end: float, share: Share = Share()
    ) -> bool:
        """Write and read missing pieces. Return False if the time ran out, or if groups to
        falsify are in another share."""
        due = deque(share.take(ways))
        waited = 0
        while due and waited < len(due):
            way, piece = due.popleft()
            if self._store.is_seen(way, piece):
                continue
            if perf_counter() > end:
                return False
            if self._piece(way, ways, questions, piece):
                waited = 0
            else:
                due.append((way, piece))
                waited += 1
        return not due

    def rate(self, side: Side, tasks: Sequence[GroupTask]) -> float:
        """Return the tokens per CPU second of one engine."""
        engine = self._engine(side, self._model)
        before = process_time()
        groups = draw_all(engine, tasks, self._sampling)
        seconds = process_time() - before
        return sum(len(one.tokens) for group in groups for one in group.completions) / seconds

    def _piece(self, way: Way, ways: Sequence[Way], questions: Questions, piece: int) -> bool:
        """Write and read a piece. Return False if it must wait for another piece's work."""
        numbers = way.numbers(piece)
        tasks = make_tasks(self._model, questions, numbers)
        if way.falsifies:
            groups = self._falsified(way, ways, piece)
        else:
            groups = self._store.groups(way, piece)
        if groups is None:
            if way.falsifies:
                return False
            engine = self._engine(self._writer, self._policy(way.writes, way.claims))
            before = process_time()
            groups = self._write(engine, way, questions, numbers)
            self._store.keep_groups(way, piece, groups, process_time() - before)
        engine = self._engine(self._reader, self._policy(way.claims, ""))
        both = list(zip(tasks, groups, strict=False))  # of the honest piece there may be more
        scored = engine.score(
            [one for one, _ in both], [one for _, one in both], self._sampling
        )
        self._store.keep_evidence(way, piece, [one.evidence for one in scored])
        return True

    def _falsified(self, way: Way, ways: Sequence[Way], piece: int) -> list[Group] | None:
        """Return falsified honest work, once it is written."""
        honest = self._store.groups(ways[0], piece)
        foreign = [self._store.groups(other, piece) for other in ways if other.name == FOREIGN]
        if honest is None or None in foreign:
            return None
        written = foreign[0] if foreign and foreign[0] is not None else honest
        ends, values = self._config.end_tokens, self._sampling.proof_values
        vocabulary = self._config.shape.vocabulary
        recorded = Recorded(
            honest, written, ends, vocabulary, values, Random(f"{way.name} {piece}")
        )
        return FALSIFIED[way.falsifies](recorded)

    def _write(
        self, engine: LocalEngine, way: Way, questions: Questions, numbers: range
    ) -> list[Group]:
        sampling = replace(self._sampling, temperature=way.temperature)
        salts = [way.salt, *(f"try {number}" for number in range(1, way.tries))]
        tries = [
            draw_all(
                engine, make_tasks(self._model, questions, numbers, salt, way.shift), sampling
            )
            for salt in salts
        ]
        return likeliest(tries)

    def _policy(self, name: str, claimed: str) -> Path:
        if name in WEIGHTS_MADE:
            path = self._store.weights / f"{claimed or 'base'}-{name.replace(' ', '-')}"
            with _alone(path.with_suffix(".lock")):
                if not path.exists():
                    unfinished = path.with_suffix(".tmp")
                    rewrite(self._policy(claimed, ""), unfinished, WEIGHTS_MADE[name])
                    unfinished.rename(path)
            return path
        if not name:
            return self._model
        if self._policies is None:
            raise ValueError(f"{name} is a policy, and --policies were not given")
        return self._policies / name

    def _engine(self, side: Side, policy: Path) -> LocalEngine:
        # vLLM sets up the process before torch is there
        both = sorted({self._writer, self._reader}, key=lambda one: one.kind, reverse=True)
        for one in both if not self._engines else ():
            config = replace(self._config, kind=one.kind, device=one.device)
            self._engines[one] = make_engine(config)
        if self._loaded.get(side) != policy:
            self._engines[side].load(str(policy))
            self._loaded[side] = policy
        return self._engines[side]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process makes the same weights."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
