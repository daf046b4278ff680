"""Containment of worker processes, which reach nothing of this machine but their grants.

`confinement` says what a worker may reach and use, as a value that a caller hands to
`World.open_worker`. The other modules carry it out, each a step of the way in:

- `installation` finds what Python needs to run: its libraries, and where packages lie.
- `launch` makes the command and the environment that a worker starts with: the words of
  ``bwrap`` on Linux, a profile on macOS. It tries on this machine which way works, with a
  worker that attempts what it must not be able to do (`trial`).
- `entry` is what runs first in there. It limits the process, gives up what it must not keep,
  installs the filter of system calls that `seccomp` assembles, says that it is ready, and only
  then becomes the worker. Until then no stranger's byte has reached the process.

`p2p.worker_process` puts them together.
"""

from p2p.sandbox.confinement import Confinement, Containment

__all__ = ["Confinement", "Containment"]
