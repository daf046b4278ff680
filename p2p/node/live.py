"""The line that tells a person how a node is getting on.

On a terminal it is one line, redrawn every second. Elsewhere (a pipe, a file, a service
manager's journal) it is a line a minute: 1,440 a day are read, 86,400 are not. A line also
comes at once when a role has nothing left to do, and when the node ends.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

import trio

from p2p.node.node import Node
from p2p.node.process import CLEAR_LINE, is_terminal
from p2p.node.role import Progress, Reporter, Role

REDRAW: Final = 1.0
"""Seconds between looks at the node: a person sees that it lives, and it costs 0.1 ms."""
PIPED: Final = 60.0
"""Seconds between lines where nothing can be redrawn: 1,440 lines a day are read, 86,400 are
not."""
OVER: Final = (
    "the run is over: nothing is left to do, and this node only relays; Ctrl-C ends it"
)


def describe(node: Node, roles: Sequence[Role]) -> str:
    """Policy, what the roles did, peers: what a person asks of a node that runs."""
    newest = int(node.shardcast.newest)
    return "   ".join(
        [
            _policy(node, newest),
            *(progress.text for progress in progress_of(roles)),
            f"peers {node.membership.size}",
        ]
    )


def _policy(node: Node, newest: int) -> str:
    """The newest policy that is whole here, how much of a newer one is, and what members of
    this run say they hold.
    """
    run = node.run.id
    members = (member for member in node.membership.members() if member.run == run)
    ahead = max((member.policy for member in members), default=-1)
    held = f"policy {newest}" if newest >= 0 else "no policy yet"
    coming = node.shardcast.fetching
    if coming is not None and coming[0] > newest:
        held += f", {coming[1]:.0%} of {coming[0]}"
    return f"{held} (the swarm has {ahead})" if ahead > newest else held


def progress_of(roles: Sequence[Role]) -> list[Progress]:
    """The progress of all roles that report any."""
    return [role.progress() for role in roles if isinstance(role, Reporter)]


class LiveLine:
    """Writes the line to standard output, in a thread: a terminal that is stopped must not stop
    the node.
    """

    def __init__(self, node: Node, roles: Sequence[Role]) -> None:
        self._node = node
        self._roles = roles
        self._redrawn = is_terminal(sys.stdout)
        self._clear = CLEAR_LINE if self._redrawn else ""
        self._over = False

    async def run(self) -> None:
        """Tell until cancelled, then a last time."""
        now = self._node.world.now
        due, printed = now(), -math.inf
        try:
            while True:
                is_over = await self._tell_if_over()
                if self._redrawn:
                    await self._write(self._fitting(describe(self._node, self._roles)))
                elif now() - printed >= PIPED or is_over:
                    printed = now()
                    await self._write(describe(self._node, self._roles) + "\n")
                due += REDRAW
                await self._node.world.sleep_until(due)
        finally:
            self._print(f"{self._clear}ended    {describe(self._node, self._roles)}\n")

    async def _tell_if_over(self) -> bool:
        """Say once that the run is over; True if that was now."""
        progress = progress_of(self._roles)
        if self._over or not progress or not all(one.over for one in progress):
            return False
        self._over = True
        await self._write(f"{self._clear}over     {OVER}\n")
        return True

    def _fitting(self, text: str) -> str:
        """Shorten the text to one terminal line: a longer one would wrap and could not be
        redrawn."""
        width = shutil.get_terminal_size().columns - 1
        return f"{CLEAR_LINE}{text if len(text) <= width else text[: width - 1] + '…'}"

    async def _write(self, text: str) -> None:
        await trio.to_thread.run_sync(partial(self._print, text), abandon_on_cancel=True)

    def _print(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # who listened has gone; the node has not
            print(text, end="", flush=True)  # noqa: T201 - standard output is for people here
