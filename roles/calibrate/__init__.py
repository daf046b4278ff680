"""The evidence that honest work and cheats leave under a run's model, and the limits that
follow.

Honest numerics depend on model, dtype and the two engines, so limits are measured and never
copied: the paper's let int8 weights through on small models, and those of small models reject
honest work of large ones. ``shoal calibrate`` draws with one engine and replays with another,
honestly and in every way to cheat that we know of, and writes a ``[limits]`` table for a draft.
Of several engines each pair is measured, and the limits are the widest of any.

Read `measure` first: honest work and cheats through the engines' own interface. `weights` makes
the files of the cheats that load other weights; `limits` fits limits to what was measured, and
says how often they are wrong; `command` is the command line.
"""

from roles.calibrate.command import main

__all__ = ["main"]
