"""Conditions to wait for, a guard against concurrent calls, and the leaves of exception groups.

Each of these was written by hand in a dozen places. trio has the parts, but for two of them
only in private (`trio._util.ConflictDetector`) or under another name (`trio.lowlevel`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import TracebackType

import trio

from p2p.errors import ConfigError


def require_trio() -> None:
    """Raise `ConfigError` outside trio, where the first await would fail with a sentence about
    trio's insides."""
    if not trio.lowlevel.in_trio_run():
        raise ConfigError(
            "Shoal runs on trio: start with trio.run(main), or, inside an asyncio program, with"
            " trio's guest mode (trio.lowlevel.start_guest_run)"
        )


@asynccontextmanager
async def open_bare_nursery() -> AsyncIterator[trio.Nursery]:
    """Open a nursery for a block of a caller; what the block raises comes out unwrapped.

    trio wraps it in a group, so that ``except KeyboardInterrupt`` around a program in four of
    our blocks would catch nothing. Exceptions of our own tasks stay in their group.
    """
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except BaseException as error:
                failure = error
                raise
    except BaseExceptionGroup as group:
        if failure is not None and group.exceptions == (failure,):
            raise failure from failure.__cause__
        raise


class Notifier:
    """Lets tasks wait for the next change of something that its owner changes.

    The owner calls `notify_all` after each change; a task that wants a certain state looks, and
    waits for as long as it does not see it::

        async def wait_policy(self, at_least: int) -> int:
            while self._newest < at_least:
                await self._changed.wait()
            return self._newest

    A call that no task waits for is forgotten, and costs nothing: that is right where a task
    looks before it waits, with no schedule point between. Where it does not look, it needs an
    `AutoResetEvent`.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting = trio.lowlevel.ParkingLot()

    def notify_all(self) -> None:
        """Wake all tasks that wait now."""
        if self._waiting:
            self._waiting.unpark_all()

    async def wait(self) -> None:
        """Wait for the next `notify_all`."""
        await self._waiting.park()


class AutoResetEvent:
    """Tells one task that there is something to do, also while it is at work.

    `set` is remembered until `wait` returns, once, however often it was called: a node that
    loses its last neighbour during a lookup looks again when that one is over.
    """

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Let the task continue, now or when it next waits."""
        self._event.set()

    def clear(self) -> None:
        """Forget that it was set, because the task has just done all there was to do."""
        if self._event.is_set():
            self._event = trio.Event()

    async def wait(self) -> None:
        """Wait until it is set, and clear it."""
        await self._event.wait()
        self.clear()


class ConflictDetector:
    """Guards a block that only one task at a time may enter; others get
    `trio.BusyResourceError`.

    For methods that only a bug calls twice at once, such as `send_all` of a stream: a lock
    would hide the bug, and mix what the two tasks send.
    """

    __slots__ = ("_doing", "is_busy")

    def __init__(self, doing: str) -> None:
        """Guard one activity. ``doing`` completes the error message "another task is ..."."""
        self.is_busy = False
        """True if a task is in the block."""
        self._doing = doing

    def __enter__(self) -> None:
        if self.is_busy:
            raise trio.BusyResourceError(f"another task is {self._doing}")
        self.is_busy = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.is_busy = False


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Return the exceptions in a group, in order, without the groups around them; for another
    ``error`` the error alone.

    trio wraps what crosses a nursery in a group, each nursery in another, so how deep an
    exception lies says nothing.
    """
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error
