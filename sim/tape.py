"""What a core was told at L1, played to the same core at L0.

Theory of operation
-------------------
A core is a pure function of how it was made and of the events it was told. `recording` puts a subclass in
place of a core's class, in the module whose driver makes it. The subclass notes the arguments of each
core (with the state of its generators), what every callable among them answered, and each event with its
time and the digest of the effects. `replay` makes the cores again without trio, hosts, disks or links, tells
them the same, and compares digests. What differs is not pure: a clock read on the side, a shared generator,
an iteration over a set.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from types import ModuleType
from typing import Any, Protocol

from p2p.wire import pack
from sim.trace import plain


class Core(Protocol):
    """A message machine."""

    def handle(self, event: Any, now: float) -> Any:
        """Events and time in, effects out."""
        ...


class _Answers:
    """A callable that notes what another answers, or, played back, answers the same."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._noted: list[Any] = []

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        answer = self._original(*args, **keywords)
        self._noted.append(answer)
        return answer

    def played_back(self) -> Callable[..., Any]:
        """The same answers, in order, whatever is asked."""
        waiting = deque(self._noted)
        return lambda *args, **keywords: waiting.popleft()


@dataclass(frozen=True, slots=True)
class _RandomState:
    """Where a generator stood when a core got it."""

    state: tuple[Any, ...]

    def played_back(self) -> Random:
        rng = Random()
        rng.setstate(self.state)
        return rng


@dataclass(frozen=True, slots=True, eq=False)
class _Birth:
    """How a core was made."""

    kind: Callable[..., Core]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def again(self) -> Core:
        """Make it again."""
        args = [_played_back(item) for item in self.args]
        return self.kind(*args, **{key: _played_back(item) for key, item in self.keywords.items()})


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One event that a core was told, and the digest of what it wanted done about it."""

    core: int
    event: Any
    now: float
    effects: bytes


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay."""

    events: int
    differs_at: int | None
    """The first event whose effects were others; None if all were the same."""
    digest: str
    """Of all effects."""
    cpu_seconds: float


class Tape:
    """Everything that the cores of one kind were told in one simulation."""

    def __init__(self) -> None:
        self._births: list[_Birth] = []
        self._steps: list[_Step] = []

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def digest(self) -> str:
        """Of all effects so far."""
        return _rolled(step.effects for step in self._steps)

    def born(self, birth: _Birth) -> int:
        """Note a new core; returns its number."""
        self._births.append(birth)
        return len(self._births) - 1

    def stepped(self, core: int, event: Any, now: float, effects: Any) -> None:
        """Note one event."""
        self._steps.append(_Step(core, event, now, _digest(effects)))

    def replay(self) -> Replayed:
        """Make the cores again, without trio, and tell them the same."""
        started = time.process_time()
        cores = [birth.again() for birth in self._births]
        digests = [_digest(cores[step.core].handle(step.event, step.now)) for step in self._steps]
        differs_at = next(
            (number for number, step in enumerate(self._steps) if step.effects != digests[number]), None
        )
        return Replayed(len(digests), differs_at, _rolled(digests), time.process_time() - started)


@contextmanager
def recording(driver: ModuleType, name: str) -> Iterator[Tape]:
    """Note what every core of class ``name``, as the module ``driver`` makes them, is told in the block."""
    tape = Tape()
    original = getattr(driver, name)
    setattr(driver, name, _recorded(original, tape))
    try:
        yield tape
    finally:
        setattr(driver, name, original)


def _recorded(kind: Any, tape: Tape) -> Callable[..., Core]:
    class Recorded(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            notes = {key: _listened(item) for key, item in enumerate(args)}
            named = {key: _listened(item) for key, item in keywords.items()}
            self._number_on_tape = tape.born(_Birth(kind, tuple(notes.values()), named))
            super().__init__(
                *(_live(note, args[key]) for key, note in notes.items()),
                **{key: _live(note, keywords[key]) for key, note in named.items()},
            )

        def handle(self, event: Any, now: float) -> Any:
            effects = super().handle(event, now)
            tape.stepped(self._number_on_tape, event, now, effects)
            return effects

    return Recorded


def _listened(item: Any) -> Any:
    """What is noted of an argument."""
    if isinstance(item, Random):
        return _RandomState(item.getstate())
    return _Answers(item) if callable(item) and not isinstance(item, type) else item


def _live(note: Any, item: Any) -> Any:
    """What the recorded core gets in place of an argument."""
    return note if isinstance(note, _Answers) else item


def _played_back(note: Any) -> Any:
    return note.played_back() if isinstance(note, _Answers | _RandomState) else note


def _digest(effects: Any) -> bytes:
    # A driver may consume a list it was given; it was digested before.
    content = pack([plain(effect) for effect in effects]) if effects else b""
    return hashlib.blake2b(content, digest_size=16).digest()


def _rolled(digests: Iterable[bytes]) -> str:
    rolling = hashlib.blake2b(digest_size=16)
    for digest in digests:
        rolling.update(digest)
    return rolling.hexdigest()
