"""The process of an engine, and the next one when it has died.

Theory of operation
-------------------
A process ends in the middle of a call for reasons that are no peer's doing and no bug: the
kernel takes the memory back from the largest process, a driver aborts, a person kills it. The
call raises `WorkerDied`, and the next one finds a new process, configured as the first was. It
holds nothing: no weights, no optimiser. One that ends while it is configured for the first time
is replaced before its role hears of it. Each role says what it does about later ones: an
inference node loads its policy again, a validator judges what it was at inconclusive and loads
again, a trainer goes on from its checkpoint as after a restart.

Bounded: a pause before each new process, twice as long each time, and `EngineLost`, which ends
the node, when the same method has ended `MOST_DEATHS` processes with no answer in between. That
is a machine without the memory for the run. Others' work cannot be more than a run allows, as
it is checked before an engine sees it; and as long as any work of that kind is answered, a node
lives on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import trio

from p2p.errors import ShoalError, WorkerDied
from p2p.sandbox import Confinement
from p2p.world import Worker, World
from roles.engines import codec
from roles.workers.start import start_worker

FIRST_PAUSE: Final = 1.0
"""Seconds before a second process: what ended the first, another program that wants memory, may
be over by then. Twice as long before each further one, until a call is answered."""
MOST_DEATHS: Final = 5
"""Processes that one method may end in a row: with pauses of 1, 2, 4 and 8 s between them, a
quarter of a minute beside the time that the engine takes to start, for what passes to pass."""


class EngineLost(ShoalError):
    """An engine's process ends again and again at the same work. Give the machine more memory,
    or the node another run or engine."""


@asynccontextmanager
async def open_lasting_worker(
    world: World, argv: Sequence[str], *, name: str, confined: Confinement | None = None
) -> AsyncIterator[LastingWorker]:
    """Like `World.open_worker`, with a new process after each that dies."""
    async with AsyncExitStack() as stack:
        worker = LastingWorker(world, argv, name, stack, confined)
        await worker.start()
        yield worker


class LastingWorker:
    """A `Worker` that is replaced when it has died. Its first call is repeated to each new
    process."""

    def __init__(
        self,
        world: World,
        argv: Sequence[str],
        name: str,
        stack: AsyncExitStack,
        confined: Confinement | None = None,
    ) -> None:
        self._world = world
        self._argv = argv
        self._name = name
        self._confined = confined
        self._stack = stack
        """Closes the process, if there is one."""
        self._worker: Worker | None = None
        self._first = b""
        self._deaths: Counter[str] = Counter()
        """By method, since one was answered."""
        self._turn = trio.Lock()

    async def start(self) -> None:
        """Start a process. Raises `WorkerNotStarted`."""
        self._worker = await start_worker(
            self._world,
            self._argv,
            name=self._name,
            stack=self._stack,
            confined=self._confined,
        )

    async def call(self, request: bytes) -> bytes:
        """Raises `WorkerDied` if the process ended, and `EngineLost` if it always does."""
        async with self._turn:
            method, _ = codec.decode_request(request)
            try:
                reply = await (await self._living()).call(request)
            except WorkerDied as error:
                await self._bury(method, error)
                raise
            self._first = self._first or request
            del self._deaths[method]
            return reply

    async def _living(self) -> Worker:
        """The process, or a new one that was configured as the first."""
        if self._worker is None:
            pause = FIRST_PAUSE * 2.0 ** (max(self._deaths.values(), default=1) - 1)
            await self._world.sleep(pause)
            await self.start()
            assert self._worker is not None
            if not self._first:  # the first died before it was configured
                return self._worker
            reply = codec.decode_reply(await self._worker.call(self._first))
            if isinstance(reply, codec.Failure):
                raise WorkerDied(
                    f"another process of {self._name} cannot be configured as the first was:"
                    f" {reply.kind}: {reply.message}"
                )
        assert self._worker is not None
        return self._worker

    async def _bury(self, method: str, error: WorkerDied) -> None:
        self._worker = None
        await self._stack.aclose()
        self._deaths[method] += 1
        if self._deaths[method] >= MOST_DEATHS:
            raise EngineLost(
                f"{error}, {self._deaths[method]} times in a row at {method}: does this machine"
                " have the memory that the run needs (docs/running.md)? The kernel's log says"
                " whether it ended the process"
            ) from error
