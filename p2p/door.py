"""Arguments of an embedding program, checked where they come in.

A wrong argument is answered with a sentence that names it, and not with silence, or with the
error of whatever stumbles over the value later: ``listen="/ip4/…"`` is a sequence of
characters, and a handler that is not async fails in the task of a peer. Wrong types raise
`TypeError`, wrong values `ValueError`, and what is closed `trio.ClosedResourceError`, as in
trio.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final, TypeVar

T = TypeVar("T")

_NAMES: Final = {
    str: "text",
    bytes: "bytes",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
}
_HINTS: Final = {
    ("bytes", str): "encode it, as in text.encode()",
    ("str", bytes): "decode it, as in data.decode()",
    ("PeerId", str): "PeerId.from_base58(text) reads it",
    ("PeerId", bytes): "PeerId(data) names the peer",
    ("KeyPair", bytes): "KeyPair(seed) makes one of 32 bytes",
    ("Multiaddr", str): "Multiaddr.parse(text) reads it",
}
"""Remedies for wrong argument types, by expected and given type."""


def check(argument: str, value: object, *kinds: type) -> None:
    """Raise a `TypeError` that names ``argument`` unless ``value`` is of one of ``kinds``."""
    if isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds):
        return
    hint = next(
        (
            f": {words}"
            for (wanted, given), words in _HINTS.items()
            if isinstance(value, given) and wanted in {kind.__name__ for kind in kinds}
        ),
        "",
    )
    wanted = " or ".join(_NAMES.get(kind) or f"a {kind.__name__}" for kind in kinds)
    raise TypeError(f"{argument} must be {wanted}, not {_shown(value)}{hint}")


def check_each(argument: str, values: Iterable[T], *kinds: type) -> tuple[T, ...]:
    """Return ``values`` as a tuple. Raise `TypeError` unless each is of one of ``kinds``.

    A text is a sequence of texts, and bytes of numbers: neither is taken for a collection.
    """
    if type(values) is not tuple and (
        isinstance(values, str | bytes) or not isinstance(values, Iterable)
    ):
        raise TypeError(
            f"{argument} must be a list, not {_shown(values)}: write {argument}=[...]"
        )
    found = values if type(values) is tuple else tuple(values)
    for index, value in enumerate(found):
        if type(value) not in kinds:  # else no name is made, which takes longest
            check(f"{argument}[{index}]", value, *kinds)
    return found


def check_number(
    argument: str, value: object, least: float = 0, most: float = math.inf, *kinds: type
) -> None:
    """Raise `TypeError` or `ValueError` unless ``value`` is a number within these limits.

    Args:
        argument: The name of the argument.
        value: What was given for it.
        least: The smallest number that makes sense.
        most: The largest.
        kinds: Types that are taken: by default whole numbers only.
    """
    check(argument, value, *(kinds or (int,)))
    assert isinstance(value, int | float)
    if not least <= value <= most:
        limits = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
        raise ValueError(f"{argument} must be {limits}, not {value:g}")


def check_function(
    argument: str, function: object, parameters: int, *, is_async: bool = False
) -> None:
    """Raise `TypeError` unless ``function`` can be called with so many positional arguments.

    It must be async, or must not be, as far as that shows before it is called: a lambda, or an
    object that can be called, may return what is awaited.
    """
    if not callable(function) or (is_async and isinstance(function, type)):
        raise TypeError(f"{argument} must be a function, not {_shown(function)}")
    name = getattr(function, "__name__", type(function).__name__)
    plain = function.func if isinstance(function, functools.partial) else function
    if not inspect.isroutine(plain) and not isinstance(plain, type):
        plain = getattr(plain, "__call__", plain)  # noqa: B004 - to look at how it is defined
    is_coroutine = inspect.iscoroutinefunction(plain)
    is_defined = isinstance(plain, types.FunctionType | types.MethodType) and name != "<lambda>"
    if is_async and is_defined and not is_coroutine:
        raise TypeError(f"{argument} must be async: write async def {name}(...)")
    if not is_async and is_coroutine:
        raise TypeError(
            f"{argument} must not be async, since nobody awaits it: write def {name}(...)"
        )
    try:
        inspect.signature(function).bind(*[None] * parameters)
    except ValueError:  # built in, without a signature
        return
    except TypeError as error:
        raise TypeError(
            f"{argument} is called with {parameters} arguments, and {name} does not take them:"
            f" {error}"
        ) from None


def check_has(argument: str, value: object, kind: str, *names: str) -> None:
    """Raise `TypeError` unless ``value`` has the ``names`` that a ``kind`` has."""
    if isinstance(value, type):
        raise TypeError(
            f"{argument} must be a {kind}, not a class: {value.__name__}() makes one"
        )
    if all(hasattr(value, name) for name in names):
        return
    opened = ": enter it with async with first" if hasattr(value, "__aenter__") else ""
    raise TypeError(f"{argument} must be a {kind}, not {_shown(value)}{opened}")


def check_world(world: object) -> None:
    """Raise unless ``world`` is an open `p2p.world.World`."""
    check_has("world", world, "World, as open_world makes it", "signer", "entropy", "call_at")
    if getattr(world, "is_closed", False):
        raise ValueError("world is closed: its open_world block has ended")


def check_host(host: object) -> None:
    """Raise `TypeError` unless ``host`` is a `p2p.host.Host`."""
    check_has("host", host, "Host, as open_host makes it", "open_stream", "send", "connected")


def check_fields(config: Any) -> None:
    """Raise a `TypeError` that names the field if a field of a dataclass has a value of another
    type."""
    kind: Any = type(config)
    check_values(kind, {name: getattr(config, name) for name in _hints(kind)})


def check_values(kind: Any, values: Mapping[str, object]) -> None:
    """Raise `TypeError` unless ``values`` have the types that the fields of ``kind`` have."""
    hints = _hints(kind)
    for name, value in values.items():
        hint, argument = hints.get(name), f"{kind.__name__}({name})"
        if typing.get_origin(hint) is tuple:
            check_each(argument, value, typing.get_args(hint)[0])  # type: ignore[arg-type]
        elif hint is float:
            check(argument, value, int, float)
            if value != value:
                raise ValueError(f"{argument} must be a number, not nan")
        elif isinstance(hint, type):
            check(argument, value, hint)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _shown(value: object) -> str:
    """Return a wrong value as shown in an error. Bytes are not quoted, since they may be a
    key."""
    if isinstance(value, str):
        return f"the text {value:.40}"
    if isinstance(value, bool | int | float) or value is None:
        return f"{value!r:.40}"
    if isinstance(value, bytes):
        return "bytes" if type(value) is bytes else f"a {type(value).__name__}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "a function" if inspect.isroutine(value) else f"a {type(value).__name__}"
