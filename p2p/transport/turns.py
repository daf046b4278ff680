"""Costly work for peers, one piece in each pass of the scheduler."""

from __future__ import annotations

import trio


class Turns:
    """A queue in which one task goes on in each pass of the scheduler, first come, first
    served.

    trio runs every task that can run in each pass. Tasks that only make a checkpoint between
    two pieces of costly work therefore all work in every pass: with 36 peers that opened 256
    streams each a pass took up to a second, and a newcomer's dial, ping and identify take about
    ten passes. A task that waits here between its pieces shares one piece a pass with all
    others that do, and everything else runs in every pass."""

    __slots__ = ("_taken", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[trio.Event, None] = {}
        self._taken = False

    async def wait(self) -> None:
        """Return in a pass in which no other task returns from here; a checkpoint."""
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
        """Let the next one go on, in the next pass."""
        for turn in self._waiting:
            del self._waiting[turn]
            turn.set()
            return
        self._taken = False
