"""``shoal doctor``: what this machine lacks for a node, each with its remedy.

- `sighting`: what is looked at (a `Sighting` is a value, so that checks can be tested).
- `asking`: what bootstrap peers say of it.
- `checks`: what is judged of it. A new check is a field of `Sighting` and a function in
  `checks.CHECKS`.
- `command`: the command line.
"""

from roles.doctor.command import main

__all__ = ["main"]
