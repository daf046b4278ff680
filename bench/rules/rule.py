"""What a rule is, and how it is switched off."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

from p2p.bounded import KeyedQuotas, RateLimit

HUGE: Final = 10**9
"""Stands for a maximum number that is switched off."""


class _Unlimited(KeyedQuotas):
    """Quotas without a limit, and without a memory: many swarms share them."""

    def take(self, peer: bytes, now: float, count: float = 1.0) -> bool:
        return True

    def has(self, peer: bytes, now: float) -> bool:
        return True

    def level(self, peer: bytes, now: float) -> float:
        return 1e12


UNLIMITED: Final = RateLimit(1e12, 1e12)
UNLIMITED_EACH: Final = _Unlimited(1.0, 1.0)


@dataclass(frozen=True)
class Rule:
    """A rule, the law that it protects, and what replaces it when it is off."""

    law: str
    off: Mapping[str, object] = field(repr=False)
    """Replacements by ``module:NAME``, ``module:Class.name``, or ``module:Class().name`` for
    an attribute that each instance gets in its ``__init__``."""
    scenarios: tuple[str, ...] = ()
    """Scenarios that examine it."""
    tests: str = ""
    """Names of the service's tests that examine it, for pytest's ``-k``; all if empty."""


@dataclass(frozen=True)
class Exam:
    """Metrics by which a scenario is judged, and changes that make it cheap."""

    metrics: tuple[str, ...] = ("seconds_100",)
    changes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Service:
    """A package of ``p2p``: its rules, and the scenarios and tests that judge them."""

    name: str
    rules: Mapping[str, Rule]
    scenarios: Mapping[str, Exam] = field(default_factory=dict)
    tests: tuple[str, ...] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
    """Modules below the service (``core.table``), or their constants (``core.table:NAME``),
    whose limits are no rules, each with the reason."""


def always(value: object) -> Callable[..., object]:
    """Return a method that gives ``value``."""
    return lambda *_, **__: value


def fixed(value: object) -> property:
    """Return a property that is ``value``."""
    return property(lambda _: value)


def edited(place: str, old: str, new: str) -> object:
    """Return the function, method or property at ``place`` with a piece of its source replaced,
    for rules whose number or condition stands in the middle of it.

    Raises:
        AttributeError: Its source does not have ``old`` exactly once.
    """
    owner, name = carrier(place)
    found = vars(owner)[name]
    function = inspect.unwrap(getattr(found, "fget", found))
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise AttributeError(f"{place} carries no {old!r} any more")
    made: dict[str, object] = {}
    exec(
        f"from __future__ import annotations\n{source.replace(old, new)}",
        vars(sys.modules[function.__module__]),
        made,
    )
    return made[name]


def edit(place: str, old: str, new: str) -> dict[str, object]:
    """Return the switch of a rule that is `edited` at one place."""
    return {place: edited(place, old, new)}


def carrier(place: str) -> tuple[Any, str]:
    """Return the module or class that carries a rule, and the name of its attribute.

    Raises:
        AttributeError: Nothing of that name is there.
    """
    module, _, path = place.partition(":")
    *outer, last = path.split(".")
    owner: Any = importlib.import_module(module)
    for name in outer:
        owner = getattr(owner, name.removesuffix("()"))
    made = inspect.unwrap(owner.__init__).__code__ if "()" in path else None
    found = (
        vars(owner) if made is None else (*made.co_names, *made.co_consts, *made.co_varnames)
    )
    if last not in found:
        raise AttributeError(f"{place} carries no rule any more")
    return owner, last


def switch_off(rule: Rule) -> None:
    """Replace the implementation of a rule for the rest of this process, also where modules of
    p2p have imported it by name."""
    for place, value in rule.off.items():
        owner, name = carrier(place)
        if "()" in place:
            owner.__init__ = _with_attribute(owner.__init__, name, value)
            continue
        old = vars(owner)[name]
        setattr(owner, name, value)
        for module in [held for key, held in sys.modules.items() if key.startswith("p2p.")]:
            if "." not in place.partition(":")[2] and vars(module).get(name) is old:
                setattr(module, name, value)


def _with_attribute(
    initialise: Callable[..., None], name: str, value: object
) -> Callable[..., None]:
    @wraps(initialise)
    def changed(self: object, *args: object, **options: object) -> None:
        initialise(self, *args, **options)
        object.__setattr__(self, name, value)

    return changed
