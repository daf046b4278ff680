"""A whole swarm on one machine, for show: ``shoal demo``, ``python -m roles.demo``.

Read `command` first: it reads the command line, plays, and judges the outcome. `players` says
who plays, `shows` what. `processes` writes the run file, starts a node of each role and hears
what they say of themselves; `status` sums that up; `view` draws it, and `page` shows it to
browsers; `guests` welcomes strangers who join. `cheats` are the nodes that must be caught.
`alone` is the same learning in one process, without nodes: ``python -m roles.demo.alone``.
`gate` says, of the first evaluation and the last, whether a run has learned. `pretraining` is
the other demo, ``--diloco``.

How data flows: each node prints its health as a line of JSON; those lines, and nothing else,
are what the command knows of its swarm.
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
