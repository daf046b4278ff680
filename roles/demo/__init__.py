"""A whole swarm on one machine, for show: ``shoal demo``, ``python -m roles.demo``.

Read `command` first: it makes a run's folder with a cheat in it, plays it as ``shoal run
start`` does (`roles.own`), and judges the outcome. `shows` is the demo that learns from
rewards, `pretraining` the one of DiLoCo; `cheats` are the nodes that must be caught. `gate`
says, of the first evaluation and the last, whether a run has learned.
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
