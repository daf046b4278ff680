"""A whole swarm on one machine, for show: ``shoal demo``, ``python -m roles.demo``.

`command` reads the command line and judges the outcome. `processes` starts a node of each role
and hears what they say of themselves; `status` sums that up; `view` draws it. `cheats` are the
nodes that must be caught. `alone` is the same learning in one process, without nodes: ``python
-m roles.demo.alone``.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Let a swarm of real processes learn here, a cheat among them.

    See `roles.demo.command.main`. What it needs is imported now, and not by simulations.
    """
    from roles.demo import command

    return command.main(arguments)
