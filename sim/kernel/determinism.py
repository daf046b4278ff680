"""Settings of the process for determinism: the only file that touches trio's private names.

trio shuffles each batch of runnable tasks with a generator that has no public seed, from an
order that depends on memory addresses. Two private switches make both a function of the seed;
pytest-trio and Hypothesis lean on the same two. A third private name, a task's cancel status,
serves only when a run cannot end otherwise. tests/simulation/test_determinism.py pins what is
relied on, in a plain subprocess with 1,000 tasks: with 200 a run without the first switch still
looked deterministic.
"""

from __future__ import annotations

import gc
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NoReturn

import trio
from trio._core import _run

from sim.errors import SimForbidden

GC_THRESHOLDS: Final = (200_000, 50, 1000)
"""Thresholds of Python's garbage collector in a simulation, which holds millions of long-lived
objects and would walk them again and again. `sim.node.swarm.COLLECT_AFTER` collects what is
left."""

_DOORS: Final[tuple[tuple[object, str, str], ...]] = (
    (trio.to_thread, "run_sync", "use World.run_blocking"),
    (threading.Thread, "start", "use World.run_blocking"),
    (subprocess.Popen, "__init__", "use World.open_worker, at L3"),
    (socket.socket, "connect", "use Network.dial"),
    (socket.socket, "connect_ex", "use Network.dial"),
    (socket.socket, "bind", "use Network.listen"),
)
"""Ways to real time: (where, name, what to use instead). A real thread under a pending timer
lets 3,600 virtual seconds pass in a millisecond."""


@contextmanager
def deterministic(seed: int) -> Iterator[None]:
    """Make trio's scheduling a function of ``seed``, and keep the world out, for the length of
    the block."""
    before = _run._ALLOW_DETERMINISTIC_SCHEDULING
    state = _run._r.getstate()
    _run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    _run._r.seed(seed)
    try:
        with raised_gc_thresholds():
            yield
    finally:
        _run._r.setstate(state)
        _run._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]


def scopes_around(task: trio.lowlevel.Task) -> Iterator[trio.CancelScope]:
    """Yield the cancel scopes that ``task`` is in, innermost first."""
    status: _run.CancelStatus | None = task._cancel_status
    while status is not None:
        yield status._scope
        status = status.parent


def lift_shields(task: trio.lowlevel.Task) -> None:
    """Let ``task`` be cancelled wherever it waits, even if it shields itself for ever."""
    for scope in scopes_around(task):
        if scope.shield:
            scope.shield = False


@contextmanager
def raised_gc_thresholds() -> Iterator[None]:
    """Let the collector look less often for the length of the block."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def closed_doors() -> Iterator[None]:
    """Make threads, processes and real sockets raise `SimForbidden` for the length of the
    block.

    Enter it inside `trio.run`.
    """
    with ExitStack() as stack:
        for place, name, remedy in _DOORS:
            stack.enter_context(_closed(place, name, remedy))
        yield


@contextmanager
def _closed(place: object, name: str, remedy: str) -> Iterator[None]:
    inherited = name not in vars(place)
    original = getattr(place, name)
    setattr(place, name, _refusal(f"{getattr(place, '__name__', place)}.{name}", remedy))
    try:
        yield
    finally:
        if inherited:
            delattr(place, name)
        else:
            setattr(place, name, original)


def _refusal(what: str, remedy: str) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise SimForbidden(f"{what} inside a simulation: {remedy}")

    return refuse
