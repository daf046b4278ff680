"""Ways to work for ``bench engines``, and a store of what was written and seen of each.

A piece is a batch of one way. Both its groups and their evidence are files, written as soon as
they are there, so that a bench that was stopped goes on, and what one engine wrote can be read
by another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any, Final

import msgpack

from proofs.checks import Evidence
from roles.calibrate.measure import likeliest
from roles.calibrate.weights import Change, rewrite, to_fp8, to_int4, to_int8
from roles.engines import codec
from roles.engines.base import Group, GroupTask, Sampling
from roles.engines.config import EngineConfig
from roles.engines.worker import LocalEngine, draw_all, make_engine
from roles.envs.text import Message
from roles.models.tokenizer import Tokenizer

SIZE: Final = 16
"""Answers of a group."""
BATCH: Final = 4
"""Groups drawn together: 64 rows."""
TOPICS: Final = (
    "the sea", "how bread is baked", "a lost dog", "the moon", "a train ride", "rain",
    "an old clock", "prime numbers", "tea", "birds in winter", "a school", "soup",
)  # fmt: skip
WEIGHTS_MADE: Final[dict[str, Change]] = {"int8": to_int8, "fp8": to_fp8, "int4": to_int4}
"""Of the policy that is claimed, by name; other names are folders."""


class Questions(Enum):
    """What is asked."""

    TOPICS = "topics"
    """Open questions, to which answers are as long as they may be."""
    ADDITION = "addition"
    """Sums of two-digit numbers, with the beginning of the answer: a few tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to work: what is claimed, and what is done."""

    name: str
    groups: int
    claims: str = ""
    """The policy; empty: the model's own."""
    writes: str = ""
    """The one drawn from."""
    temperature: float = 1.0
    tries: int = 1
    """Draws of which the likeliest answer is taken, the first by the seed that is due."""
    shift: int = 0
    """Answers so many tasks further on."""
    is_honest: bool = True

    @property
    def pieces(self) -> range:
        """Numbers of its batches."""
        return range(-(-self.groups // BATCH))

    def numbers(self, piece: int) -> range:
        """Groups of one of them."""
        return range(piece * BATCH, min(self.groups, (piece + 1) * BATCH))


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
    """Files of what one engine wrote, and of what another saw in it."""

    def __init__(self, folder: Path, kind: str, reader: str) -> None:
        self.weights = folder / "weights"
        self._written = folder / kind / "written"
        self._seen = folder / kind / f"seen-by-{reader}"
        for path in (self.weights, self._written, self._seen):
            path.mkdir(parents=True, exist_ok=True)

    def groups(self, way: Way, piece: int) -> list[Group] | None:
        """What was written, or None."""
        value = _read(self._written / _name(way, piece))
        return value and [codec.decode_group(group) for group in value[2]]

    def keep_groups(
        self, way: Way, piece: int, groups: Sequence[Group], seconds: float
    ) -> None:
        """With the CPU seconds that writing took."""
        tokens = sum(len(one.tokens) for group in groups for one in group.completions)
        value = (seconds, tokens, [codec.encode_group(group) for group in groups])
        _write(self._written / _name(way, piece), value)

    def written(self, way: Way) -> tuple[int, float]:
        """Tokens, and CPU seconds for them."""
        found = [_read(self._written / _name(way, piece)) for piece in way.pieces]
        there = [value for value in found if value]
        return sum(value[1] for value in there), sum(value[0] for value in there)

    def is_seen(self, way: Way, piece: int) -> bool:
        """Whether it was read."""
        return (self._seen / _name(way, piece)).exists()

    def keep_evidence(self, way: Way, piece: int, evidence: Sequence[Evidence]) -> None:
        """What the reader saw."""
        _write(
            self._seen / _name(way, piece), [codec.evidence_to_wire(one) for one in evidence]
        )

    def evidence(self, way: Way) -> list[Evidence]:
        """Of all pieces that were read."""
        found = (_read(self._seen / _name(way, piece)) for piece in way.pieces)
        return [codec.evidence_from_wire(one) for value in found for one in value or ()]


def _name(way: Way, piece: int) -> str:
    return f"{way.name.replace(' ', '-')}.{piece:03}"


def _read(path: Path) -> Any:
    return msgpack.unpackb(path.read_bytes()) if path.exists() else None


def _write(path: Path, value: object) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(msgpack.packb(value))
    unfinished.replace(path)


class Workshop:
    """Both engines, each with the policy that it was given last."""

    def __init__(
        self,
        config: EngineConfig,
        reader: str,
        sampling: Sampling,
        model: Path,
        policies: Path | None,
        store: Store,
    ) -> None:
        self._config = config
        self._names = (config.kind, reader)
        self._sampling = sampling
        self._model = model
        self._policies = policies
        self._store = store
        self._engines = dict[str, LocalEngine]()
        self._loaded = dict[str, Path]()

    def advance(self, ways: Sequence[Way], questions: Questions, end: float) -> bool:
        """Write and read what is not there yet; False if the time was over before."""
        for way in ways:
            for piece in way.pieces:
                if self._store.is_seen(way, piece):
                    continue
                if perf_counter() > end:
                    return False
                self._piece(way, questions, piece)
        return True

    def rate(self, kind: str, tasks: Sequence[GroupTask]) -> float:
        """Tokens per CPU second of one engine."""
        engine = self._engine(kind, self._model)
        before = process_time()
        groups = draw_all(engine, tasks, self._sampling)
        seconds = process_time() - before
        return sum(len(one.tokens) for group in groups for one in group.completions) / seconds

    def _piece(self, way: Way, questions: Questions, piece: int) -> None:
        writer, reader = self._names
        numbers = way.numbers(piece)
        tasks = make_tasks(self._model, questions, numbers)
        groups = self._store.groups(way, piece)
        if groups is None:
            engine = self._engine(writer, self._policy(way.writes, way.claims))
            before = process_time()
            groups = self._write(engine, way, questions, numbers)
            self._store.keep_groups(way, piece, groups, process_time() - before)
        engine = self._engine(reader, self._policy(way.claims, ""))
        scored = engine.score(tasks, groups, self._sampling)
        self._store.keep_evidence(way, piece, [one.evidence for one in scored])

    def _write(
        self, engine: LocalEngine, way: Way, questions: Questions, numbers: range
    ) -> list[Group]:
        sampling = replace(self._sampling, temperature=way.temperature)
        salts = ["", *(f"try {number}" for number in range(1, way.tries))]
        tries = [
            draw_all(
                engine, make_tasks(self._model, questions, numbers, salt, way.shift), sampling
            )
            for salt in salts
        ]
        return likeliest(tries)

    def _policy(self, name: str, claimed: str) -> Path:
        if name in WEIGHTS_MADE:
            path = self._store.weights / f"{claimed or 'base'}-{name}"
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

    def _engine(self, kind: str, policy: Path) -> LocalEngine:
        # vLLM sets up the process before torch is there
        for name in sorted({*self._names}, reverse=True) if not self._engines else ():
            self._engines[name] = make_engine(replace(self._config, kind=name))
        if self._loaded.get(kind) != policy:
            self._engines[kind].load(str(policy))
            self._loaded[kind] = policy
        return self._engines[kind]
