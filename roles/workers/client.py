"""The node's side: a worker process that answers calls, and the next one when it has died.

Theory of operation
-------------------
A process ends in the middle of a call for reasons that are no peer's doing and no bug: the
kernel takes the memory back from the largest process, a driver aborts, a person kills it. The
call raises `WorkerDied`, and the next one finds a new process, configured as the first was.

Of a process that *keeps* something (weights, an optimiser) each death is told to the caller,
once, who then says what the new process needs. Before it is a pause, twice as long each time,
and `WorkerLost`, which ends the node, when the same method has ended `MOST_DEATHS` processes
with no answer in between: a machine without the memory for the run. Of one that keeps nothing
(an environment) the next call has a new process at once, also after a call that was too slow,
cancelled, or answered with nonsense.

A fork fails when the memory, the processes of the user or cgroup, or the open files of this
process are used up. Other programs give them back, mostly within seconds, so it is tried again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any, Final, TypeVar, overload

import trio

from p2p.errors import BadMessage, LimitExceeded, ShoalError, WorkerDied, WorkerNotStarted
from p2p.patience import fail_after_own
from p2p.sandbox import Confinement
from p2p.wire import MIB
from p2p.world import Worker, World, decode_off_loop
from roles.workers.calls import (
    MAX_FRAME,
    MAX_ITEMS,
    Failure,
    decode_reply,
    decode_reply_untrusted,
    encode_request,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

START_PAUSES: Final = (1.0, 2.0, 4.0, 8.0)
"""Seconds between five tries to start a process on a machine that refuses."""
FIRST_PAUSE: Final = 1.0
"""Seconds before a second process: what ended the first, another program that wants memory, may
be over by then. Twice as long before each further one, until a call is answered."""
MOST_DEATHS: Final = 5
"""Processes that one method may end in a row: with pauses of 1, 2, 4 and 8 s between them, a
quarter of a minute beside the time that the worker takes to start, for what passes to pass."""
FIRST_ITEMS: Final = 64
"""Numbers and texts that a stranger's process may say when it was configured."""
READ_RATE: Final = 5 * MIB
"""Bytes of a stranger's reply that are read in a second: tokens, most of which have a byte or
two."""


class WorkerLost(ShoalError):
    """A worker's process ends again and again at the same work. Give the machine more memory,
    or the node another run or engine."""


@asynccontextmanager
async def open_remote(
    world: World,
    argv: Sequence[str],
    *,
    name: str,
    otherwise: type[ShoalError],
    raises: Sequence[type[ShoalError]] = (),
    confined: Confinement | None = None,
) -> AsyncIterator[Remote]:
    """Run a worker that keeps state, for the length of the block; see `Remote`."""
    async with AsyncExitStack() as stack:
        yield Remote(
            world, argv, stack, name=name, otherwise=otherwise, raises=raises, confined=confined
        )


class Remote:
    """The methods of a worker process. Calls wait for their turn."""

    def __init__(
        self,
        world: World,
        argv: Sequence[str],
        stack: AsyncExitStack,
        *,
        name: str,
        otherwise: type[ShoalError],
        raises: Sequence[type[ShoalError]] = (),
        confined: Confinement | None = None,
        keeps: bool = True,
    ) -> None:
        """Prepare to run ``python -m`` ``argv``.

        Args:
            world: Starts the processes. Simulations have none.
            argv: The module, which calls `roles.workers.server.serve`, and its arguments.
            stack: Ends the process when it is closed. It must hold nothing else.
            name: Name of the worker, for messages to people.
            otherwise: Class for failures whose class is not among ``raises``.
            raises: Classes of failures that keep their class.
            confined: Limits of what the process may reach and use; None: no limits.
            keeps: True if the process keeps state from call to call, so that its death is
                reported.
        """
        self._world, self._argv, self._name, self._stack = world, argv, name, stack
        self._confined, self._keeps = confined, keeps
        self._raises = {kind.__name__: kind for kind in (*raises, otherwise)}
        self._otherwise = otherwise
        self._worker: Worker | None = None
        self._first: tuple[str, Sequence[object], float | None] | None = None
        self._deaths: Counter[str] = Counter()  # by method, since one was answered
        self._turn = trio.Lock()

    @property
    def process(self) -> Worker | None:
        """The process that runs, if one does."""
        return self._worker

    async def start(
        self, method: str, *arguments: object, patience: float | None = None
    ) -> Any:
        """Start the process and make its first call, which is repeated in each process that
        replaces it.

        A process that keeps something and dies during this call is replaced like one that dies
        later.

        Returns:
            What the method returned.

        Raises:
            WorkerNotStarted: The machine refuses to start a process.
            WorkerLost: Processes that keep something die again and again.
            WorkerDied: A process that keeps nothing died.
            trio.TooSlowError: There was no answer within ``patience`` seconds.
        """
        self._first = method, arguments, patience
        async with self._turn:
            while True:
                try:
                    return await self._begin()
                except WorkerDied as error:
                    if not self._keeps:
                        raise
                    logger.warning("%s while it started; it is started again", error)

    @overload
    async def call(
        self, method: str, *arguments: object, patience: float | None = ...
    ) -> Any: ...

    @overload
    async def call(
        self,
        method: str,
        *arguments: object,
        read: Callable[[object], T],
        max_items: int = ...,
        patience: float | None = ...,
    ) -> T: ...

    async def call(
        self,
        method: str,
        *arguments: object,
        read: Callable[[object], Any] | None = None,
        max_items: int = MAX_ITEMS,
        patience: float | None = None,
    ) -> Any:
        """Call a method of the process.

        Args:
            method: Its name.
            arguments: Plain values.
            read: Parser of a stranger's reply, which raises nothing but `BadMessage`. Without
                it the process is trusted.
            max_items: Numbers and texts that a stranger's reply may have.
            patience: Seconds until the process is ended for want of an answer.

        Returns:
            What the method returned, as ``read`` made it.

        Raises:
            WorkerDied: The process ended.
            WorkerLost: It always does.
            BadMessage: A stranger's process answers nonsense, and was ended.
            trio.TooSlowError: There was no answer in time, and the process was ended.
        """
        async with self._turn:
            if self._worker is None and self._first is not None:
                await self._again(method)
            return await self._exchange(method, arguments, read, max_items, patience)

    async def stop(self) -> None:
        """End the process; the next call starts another."""
        async with self._turn:
            await self._end()

    async def _end(self) -> None:
        self._worker = None
        await self._stack.aclose()

    async def _again(self, cause: str) -> None:
        """Start another process, configured as the first was."""
        if not self._keeps:
            await self._begin()
            return
        deaths = max(self._deaths.values(), default=1)
        await self._world.sleep(FIRST_PAUSE * 2.0 ** (deaths - 1))
        try:
            await self._begin()
        except (WorkerDied, WorkerNotStarted, WorkerLost):
            raise
        except ShoalError as error:
            died = WorkerDied(
                f"another process of {self._name} cannot be configured as the first: {error}"
            )
            await self._bury(cause, died)
            raise died from error

    async def _begin(self) -> Any:
        """Start a process and configure it."""
        assert self._first is not None
        for pause in START_PAUSES:
            try:
                await self._open()
                break
            except WorkerNotStarted as error:
                logger.warning("%s; it is tried again in %g s", error, pause)
            await self._world.sleep(pause)
        else:
            await self._open()
        method, arguments, patience = self._first
        is_configured = False
        try:
            read = None if self._keeps else _anything
            value = await self._exchange(method, arguments, read, FIRST_ITEMS, patience)
            is_configured = True
            return value
        finally:
            if not is_configured:
                await self._end()

    async def _open(self) -> None:
        self._worker = await self._stack.enter_async_context(
            self._world.open_worker(self._argv, name=self._name, confined=self._confined)
        )

    async def _exchange(
        self,
        method: str,
        arguments: Sequence[object],
        read: Callable[[object], Any] | None,
        max_items: int,
        patience: float | None,
    ) -> Any:
        request = encode_request(method, *arguments)
        if len(request) > MAX_FRAME:
            raise self._otherwise(
                f"{method}: a request of {len(request)} bytes is over the limit of {MAX_FRAME}"
            )
        assert self._worker is not None
        is_answered = False
        try:
            with nullcontext() if patience is None else fail_after_own(self._world, patience):
                data = await self._worker.call(request)
            if read is None:
                reply = decode_reply(data)
            else:
                reply = await decode_off_loop(
                    self._world, _read_untrusted, data, read, max_items, rate=READ_RATE
                )
            is_answered = True
        except (WorkerDied, LimitExceeded, BadMessage) as error:
            if not self._keeps:
                raise
            died = error
            if not isinstance(error, WorkerDied):
                died = WorkerDied(f"the process of {self._name} answered nonsense: {error}")
            await self._bury(method, died)
            raise died from None
        finally:
            # A caller who was cancelled is told by the next call that its process is gone.
            if not is_answered and not self._keeps:
                await self._end()
        del self._deaths[method]
        if isinstance(reply, Failure):
            if reply.kind in self._raises:
                raise self._raises[reply.kind](reply.message)
            raise self._otherwise(f"{method} failed with {reply.kind}: {reply.message}")
        return reply

    async def _bury(self, method: str, error: ShoalError) -> None:
        """Take note of a death. Raises `WorkerLost` beyond `MOST_DEATHS`."""
        await self._end()
        self._deaths[method] += 1
        if self._deaths[method] >= MOST_DEATHS:
            raise WorkerLost(
                f"{error}, {self._deaths[method]} times in a row at {method}: does this machine"
                " have the memory that the run needs (docs/runs.md)? The kernel's log says"
                " whether it ended the process"
            ) from error


def _read_untrusted(data: bytes, read: Callable[[object], T], max_items: int) -> T | Failure:
    """Return a reply, read by ``read``. Raises `BadMessage`."""
    reply = decode_reply_untrusted(data, max_items)
    return reply if isinstance(reply, Failure) else read(reply)


def _anything(value: object) -> object:
    return value
