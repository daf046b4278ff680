"""The smallest thing one task can wait for, and the raw streams that connections like best.

Costly work for peers, one piece in each pass of the scheduler.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import trio

from p2p.multiaddr import Multiaddr


class Turns:
    """A queue from which one task continues in each pass of the scheduler, first come, first
    served.

    trio runs every task that can run in each pass. Tasks that only make a checkpoint between
    two pieces of costly work therefore all work in every pass: with 36 peers that opened 256
    streams each a pass took up to a second, and a newcomer's dial, ping and identify take about
    ten passes. A task that waits here between its pieces shares one piece a pass with all
    others that do, and everything else runs in every pass.
    """

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[trio.Event, None] = {}
        self._taken = False

    async def wait(self) -> None:
        """Wait for a turn: return in a pass of the scheduler in which no other task returns
        from here. This is a checkpoint."""
        if not self._taken:
            self._taken = True
            try:
                await trio.lowlevel.checkpoint()
            finally:
                self._call()
            return
        turn = trio.Event()
        self._waiting[turn] = None
        try:
            await turn.wait()
        finally:
            if self._waiting.pop(turn, turn) is turn:
                self._call()

    def _call(self) -> None:
        """Let the next waiting task continue, in the next pass."""
        for turn in self._waiting:
            del self._waiting[turn]
            turn.set()
            return
        self._taken = False


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
        """Wake the sleeping task, if there is one."""
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None


@runtime_checkable
class AddressedStream(Protocol):
    """A raw stream that knows the address of its other end and how it ended."""

    remote_addr: Multiaddr

    def has_spoken(self) -> bool:
        """Return True if there is something to read."""
        ...

    def has_gone(self) -> bool:
        """Return True if the other end has closed its direction, even if some bytes are still
        to be read."""
        ...


@runtime_checkable
class MeteredStream(Protocol):
    """A raw stream that knows how many of its bytes have not left this machine."""

    @property
    def unsent(self) -> int:
        """Bytes that the stream has taken and that have not left this machine."""
        ...

    async def wait_unsent(self, at_most: int) -> None:
        """Return when at most ``at_most`` bytes have not left. Raise what sending raises."""
        ...

    def keep_short(self, low_water: int) -> None:
        """Stop taking data while ``low_water`` bytes are unsent, or the usual limit if that is
        lower, from now on."""
        ...


@runtime_checkable
class DirectStream(Protocol):
    """A raw stream that saves a connection the copies and scheduler passes of trio's
    interface."""

    async def receive_into(self, buffer: memoryview) -> int:
        """Receive into ``buffer`` and return the number of bytes; 0 at the end. The buffer is
        not touched before the last schedule point."""
        ...

    def send_nowait(self, data: memoryview) -> int:
        """Send as much as is possible without waiting, and return how many bytes that is. Raise
        `trio.BrokenResourceError` if the stream is broken."""
        ...
