"""What the cores were told at L1, played to the same cores at L0.

Theory of operation
-------------------
A core is a pure function of how it was made and of the events it was told. `recording` puts a
subclass in place of each core's class, in the module whose driver makes it. The subclass notes
the arguments of each core (with the state of its generators), what every callable among them
answered, and each event with its time and the digest of the effects, or of the error that was
raised. What a driver makes first to give it to its core (a routing table, a judge of records)
is noted as it was born, and made again with it; so is what the driver itself asks of such a
part later.

`Tape.replay` makes all cores again without trio, hosts, disks or links, tells them the same in
the same order, and compares digests. What differs is not pure: a clock read on the side, a
shared generator, an iteration over a set, a table that another object has written to.
"""

from __future__ import annotations

import hashlib
import importlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, wraps
from inspect import isfunction
from operator import attrgetter
from random import Random
from typing import Any, Final, Protocol
from unittest.mock import patch

from p2p.errors import ShoalError
from p2p.identity import PeerId
from p2p.wire import pack
from sim.kernel.trace import plain

CORES: Final[Mapping[str, str]] = {
    "membership": "p2p.membership.service:MembershipCore",
    "gossip": "p2p.gossip.service:GossipCore",
    "dht": "p2p.dht.service:DhtCore",
    "shardcast": "p2p.shardcast.service:ShardcastCore",
}
"""Every message machine, by where its driver looks for it."""
_ATOMS: Final = frozenset({bytes, str, float, bool, type(None), PeerId})
"""Classes whose values msgpack takes as they are."""
PARTS: Final = (
    "p2p.shardcast.service:Statements",
    "p2p.dht.service:RecordValidator",
    "p2p.dht.core.table:RoutingTable",
)
"""Objects that drivers make for their cores. Everything else that a core is given does not
change."""


class Core(Protocol):
    """The interface that recorded cores share."""

    def handle(self, event: Any, now: float) -> Any:
        """Events and time in, effects out."""
        ...


class _Answers:
    """A callable that notes what another answers to a core, or, played back, answers the
    same."""

    def __init__(self, original: Callable[..., Any], tape: Tape) -> None:
        self._original = original
        self._tape = tape
        self._noted: list[Any] = []

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        answer = self._original(*args, **keywords)
        if self._tape.listening:  # drivers ask too, for themselves
            self._noted.append(answer)
        return answer

    def again(self) -> Callable[..., Any]:
        """Give the same answers again, in order."""
        waiting = deque(self._noted)
        return lambda *args, **keywords: waiting.popleft()


@dataclass(frozen=True, slots=True)
class _RandomState:
    """State of a generator when a core received it."""

    state: tuple[Any, ...]

    def again(self) -> Random:
        rng = Random()
        rng.setstate(self.state)
        return rng


@dataclass(frozen=True, slots=True, eq=False)
class _Birth:
    """How a core, or a part of one, was made."""

    kind: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def again(self, made: dict[_Birth, Any]) -> Any:
        """Make it again, and note it in ``made``."""
        args = [_again(item, made) for item in self.args]
        named = {key: _again(item, made) for key, item in self.keywords.items()}
        made[self] = self.kind(*args, **named)
        return made[self]


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One event told to a core, and the digest of the effects it returned."""

    core: int
    event: Any
    now: float
    effects: bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A driver's call of a part, which may have changed it."""

    before: int
    """Number of the next event."""
    part: _Birth
    method: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The outcome of a replay."""

    events: int
    differs_at: int | None
    """The first event whose effects were others; None if all were the same."""
    digest: str
    """Digest of all effects."""
    cpu_seconds: float


class Tape:
    """Everything that the cores of one simulation were told, in one order."""

    def __init__(self) -> None:
        self.listening = False
        """Whether answers are noted."""
        self._births: list[_Birth] = []
        self._steps: list[_Step] = []
        self._calls: list[_Call] = []
        # by address; kept, so none is used twice
        self._parts: dict[int, tuple[object, _Birth]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def digest(self) -> str:
        """Digest of all effects so far."""
        return _rolled(step.effects for step in self._steps)

    @property
    def counts(self) -> dict[str, int]:
        """Events by class of core."""
        return dict(Counter(self.who(number) for number in range(len(self._steps))))

    def who(self, number: int) -> str:
        """The class of the core that was told event ``number``."""
        return self._births[self._steps[number].core].kind.__name__

    def describe(self, number: int) -> str:
        """Event ``number`` for a message: which core, when, and the event."""
        step = self._steps[number]
        return f"{self.who(number)} {step.core} at {step.now:.6f} s, {step.event!r:.200}"

    def born(self, birth: _Birth) -> int:
        """Note a new core; returns its number."""
        self._births.append(birth)
        return len(self._births) - 1

    def made(self, part: object, birth: _Birth) -> None:
        """Note what may become a part of a core."""
        self._parts[id(part)] = part, birth

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Within the block a core is asking, and the answers it gets are recorded."""
        self.listening, before = True, self.listening
        try:
            yield
        finally:
            self.listening = before

    def listen(self, item: Any) -> Any:
        """The record of an argument."""
        if id(item) in self._parts:
            return self._parts[id(item)][1]
        if isinstance(item, Random):
            return _RandomState(item.getstate())
        return _Answers(item, self) if callable(item) and not isinstance(item, type) else item

    def tell(
        self, number: int, handle: Callable[[Any, float], Any], event: Any, now: float
    ) -> Any:
        """Let a core handle one event, and note it."""
        try:
            with self.at_work():
                effects = handle(event, now)
        except (ShoalError, ValueError) as error:
            self._steps.append(_Step(number, event, now, _digest(error)))
            raise
        self._steps.append(_Step(number, event, now, _digest(effects)))
        return effects

    def asked(
        self, part: object, method: str, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Note what a driver asks of a part."""
        self._calls.append(
            _Call(len(self._steps), self._parts[id(part)][1], method, args, keywords)
        )

    def replay(self) -> Replayed:
        """Make the cores again, without trio, and tell them the same."""
        started = time.process_time()
        made: dict[_Birth, Any] = {}
        cores = [birth.again(made) for birth in self._births]
        calls = deque(call for call in self._calls if call.part in made)
        digests = []
        for number, step in enumerate(self._steps):
            while calls and calls[0].before <= number:
                call = calls.popleft()
                getattr(made[call.part], call.method)(*call.args, **call.keywords)
            digests.append(_answer(cores[step.core], step))
        differs_at = next(
            (
                number
                for number, step in enumerate(self._steps)
                if step.effects != digests[number]
            ),
            None,
        )
        return Replayed(
            len(digests), differs_at, _rolled(digests), time.process_time() - started
        )


@contextmanager
def recording(*names: str) -> Iterator[Tape]:
    """Note what these of `CORES`, all by default, are told in the block."""
    tape = Tape()
    with ExitStack() as stack:
        for place in PARTS:
            stack.enter_context(_replaced(place, _recorded_part, tape))
        for name in names or CORES:
            stack.enter_context(_replaced(CORES[name], _recorded_core, tape))
        yield tape


def _replaced(place: str, recorded: Callable[[Any, Tape], type], tape: Tape) -> Any:
    module, _, name = place.partition(":")
    driver = importlib.import_module(module)
    return patch.object(driver, name, recorded(getattr(driver, name), tape))


def _recorded_part(kind: Any, tape: Tape) -> type:
    class RecordedPart(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            birth = _noted(kind, args, keywords, tape)
            with tape.at_work():
                super().__init__(*map(_live, birth.args, args), **_live_named(birth, keywords))
            tape.made(self, birth)

    for name, method in vars(kind).items():
        if isfunction(method) and not name.startswith("_"):
            setattr(RecordedPart, name, _noted_method(name, method, tape))
    return RecordedPart


def _noted_method(name: str, method: Callable[..., Any], tape: Tape) -> Callable[..., Any]:
    @wraps(method)
    def noted(part: Any, *args: Any, **keywords: Any) -> Any:
        if tape.listening:
            return method(part, *args, **keywords)
        tape.asked(part, name, args, keywords)
        with tape.at_work():
            return method(part, *args, **keywords)

    return noted


def _recorded_core(kind: Any, tape: Tape) -> type:
    class Recorded(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            birth = _noted(kind, args, keywords, tape)
            self._number_on_tape = tape.born(birth)
            with tape.at_work():
                super().__init__(*map(_live, birth.args, args), **_live_named(birth, keywords))

        def handle(self, event: Any, now: float) -> Any:
            return tape.tell(self._number_on_tape, super().handle, event, now)

    return Recorded


def _noted(kind: Any, args: tuple[Any, ...], keywords: dict[str, Any], tape: Tape) -> _Birth:
    named = {key: tape.listen(item) for key, item in keywords.items()}
    return _Birth(kind, tuple(tape.listen(item) for item in args), named)


def _live(note: Any, item: Any) -> Any:
    """The argument that a replayed core gets in place of the recorded one."""
    return note if isinstance(note, _Answers) else item


def _live_named(birth: _Birth, keywords: dict[str, Any]) -> dict[str, Any]:
    return {key: _live(birth.keywords[key], item) for key, item in keywords.items()}


def _again(note: Any, made: dict[_Birth, Any]) -> Any:
    if isinstance(note, _Birth):
        return note.again(made)
    return note.again() if isinstance(note, _Answers | _RandomState) else note


def _answer(core: Core, step: _Step) -> bytes:
    try:
        return _digest(core.handle(step.event, step.now))
    except (ShoalError, ValueError) as error:
        return _digest(error)


def _digest(effects: Any) -> bytes:
    # A driver may consume a list it was given; it was digested before.
    if isinstance(effects, Exception):
        effects = [type(effects).__name__, str(effects)]
    content = pack(_content(effects)) if effects else b""
    return hashlib.blake2b(content, digest_size=16).digest()


def _content(value: Any) -> Any:
    """All of an effect, also what its repr leaves out."""
    kind: Any = type(value)
    return value if kind in _ATOMS else _reader(kind)(value)


def _contents(values: Iterable[Any]) -> list[Any]:
    return [item if type(item) in _ATOMS else _content(item) for item in values]


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """The function that turns values of this class into msgpack's items.

    Chosen once for each class: to ask of each value which of seven kinds it is was a quarter of
    the time of a replay.
    """
    if issubclass(kind, bytes | str | float | bool | None):
        return _itself
    if issubclass(kind, memoryview):
        return bytes
    if issubclass(kind, int):
        return lambda value: value if -(1 << 63) <= value < 1 << 63 else hex(value)
    if issubclass(kind, tuple | list):
        return _contents
    if issubclass(kind, Mapping):
        return lambda value: [_contents(pair) for pair in value.items()]
    if issubclass(kind, Enum):
        return attrgetter("name")
    if not is_dataclass(kind):
        return plain
    name: str = kind.__name__  # type: ignore[union-attr]
    read = [attrgetter(field.name) for field in fields(kind)]
    return lambda value: [name, *_contents([get(value) for get in read])]


def _itself(value: Any) -> Any:
    return value


def _rolled(digests: Iterable[bytes]) -> str:
    rolling = hashlib.blake2b(digest_size=16)
    for digest in digests:
        rolling.update(digest)
    return rolling.hexdigest()
