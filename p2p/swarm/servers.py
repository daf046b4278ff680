"""Tasks that serve incoming streams, one after the other.

Theory of operation
-------------------
To start a task for every stream, with a scope that can end it, is a tenth of what a small
request costs its server (`docs/performance.md`). So a task that has served a stream waits for
the next one; only streams that are served at the same time need several.

What becomes of one stream must not reach the next:

* an error ends in the host's border, which every stream has to itself;
* a task that was cancelled serves no more, even if the stream was over before it noticed;
* `Server.abort` names the stream that is to end, and does nothing once another is being served;
* a stream is served with the context variables of the task that hands it over, as in a task
  of its own.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from typing import Final

import trio

from p2p.swarm.core.limits import ServedStream
from p2p.transport.stream import MuxedStream
from p2p.transport.wakeup import Wakeup

MAX_IDLE: Final = 16
"""Tasks of one host that wait for a stream. Requests that follow each other need one; two
records of eight streams each, which is what one pass of the scheduler may bring, need 16."""

Serve = Callable[[MuxedStream, ServedStream], Awaitable[object]]
"""Serves one stream. Raises nothing that is the peer's doing, or of a bug that the peer can
trigger.
"""


class Server:
    """One task. Its owner starts `run` after the first `begin`."""

    __slots__ = ("_scope", "_task", "_wakeup", "_work")

    def __init__(self) -> None:
        self._scope = trio.CancelScope()
        self._task: trio.lowlevel.Task | None = None
        self._wakeup = Wakeup()
        self._work: tuple[MuxedStream, ServedStream] | None = None

    def begin(self, stream: MuxedStream, served: ServedStream) -> bool:
        """Serve ``stream``. Whether there is a task already; if not, `run` must be started."""
        self._work = (stream, served)
        if self._task is None:
            return False
        self._task.context = contextvars.copy_context()
        self._wakeup.set()
        return True

    def abort(self, stream: MuxedStream) -> None:
        """End the service of ``stream``; harmless when it is over."""
        if self._work is not None and self._work[0] is stream:
            self._scope.cancel()

    async def run(self, serve: Serve, idle: list[Server]) -> None:
        """Serve what `begin` names, and wait among the ``idle`` ones in between."""
        self._task = trio.lowlevel.current_task()
        with self._scope:
            while self._work is not None:
                await serve(*self._work)
                self._work = None
                if self._scope.cancel_called or len(idle) >= MAX_IDLE:
                    return
                idle.append(self)
                await self._wakeup.wait()
