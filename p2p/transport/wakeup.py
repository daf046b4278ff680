"""The smallest thing one task can wait for, and the raw streams that connections like best."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import trio

from p2p.multiaddr import Multiaddr


class Wakeup:
    """Lets one task sleep until another calls `set`, which does nothing if no task sleeps."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    async def wait(self) -> None:
        """Sleep until the next `set`."""
        if self._task is not None:
            raise trio.BusyResourceError("another task is waiting here")
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def set(self) -> None:
        """Wake who sleeps."""
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None


@runtime_checkable
class AddressedStream(Protocol):
    """A raw stream that knows where its other end is, and what became of it."""

    remote_addr: Multiaddr

    def has_spoken(self) -> bool:
        """Whether there is something to read."""
        ...

    def has_gone(self) -> bool:
        """Whether the other end has closed its direction, whatever is yet to be read."""
        ...


@runtime_checkable
class MeteredStream(Protocol):
    """A raw stream that knows how much of what it was given has not left this machine."""

    @property
    def unsent(self) -> int:
        """Bytes that it has taken and that are not on the line yet."""
        ...

    async def wait_unsent(self, at_most: int) -> None:
        """Return when there are at most so many. Raises what sending raises."""
        ...

    def keep_short(self, low_water: int) -> None:
        """From now on, take no more while ``low_water`` bytes, or the usual most, are
        unsent."""
        ...


@runtime_checkable
class DirectStream(Protocol):
    """A raw stream that can spare a connection the copies and scheduler passes of trio's
    interface.
    """

    async def receive_into(self, buffer: memoryview) -> int:
        """Receive into ``buffer``, which is not touched before the last schedule point; 0 at
        the end.
        """
        ...

    def send_nowait(self, data: memoryview) -> int:
        """Send what needs no waiting; returns how many bytes. Raises
        `trio.BrokenResourceError`.
        """
        ...
