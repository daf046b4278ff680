"""The command line of ``bwrap``: a worker's own view of the machine, mount by mount.

Pure: paths and amounts in, words out. Mounts are made in the order of the words, later ones on
top of earlier ones.

Two kinds of view. What runs strangers' code sees an empty file system with the system's
libraries, Python and what it was given, all read-only, and a ``/tmp`` of limited size. What we
trust to compute (`Confinement.sees_machine`) sees the machine read-only, without homes, and
without ``/run`` and ``/tmp``, where the sockets of other programs are.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from p2p.sandbox.confinement import Confinement, Containment, is_below
from p2p.sandbox.installation import Installation

PLAIN_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
"""All that Python ever opens below ``/dev``."""
KERNEL_FILES: Final = (
    "/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/acpi", "/proc/scsi",
    "/proc/fs", "/proc/mtrr",
)  # fmt: skip
"""The writable parts of ``/proc`` that are not about processes."""
FIRST_PROCESS: Final = "/proc/1"
"""``bwrap``'s own, which may be the same user's as the worker. No filter and no limit holds for
it: what could write to its memory would be rid of both."""
DRIVERS: Final = ("/run/opengl-driver", "/run/nvidia-persistenced")
"""Below them, and needed by drivers."""
SWITCHING: Final = ("CAP_SETUID", "CAP_SETGID")
"""Capabilities that `p2p.sandbox.entry` needs to become another user, and loses by it."""


def bwrap_command(
    containment: Containment,
    confined: Confinement,
    installation: Installation,
    *,
    folder: str,
    secrets: Sequence[str],
    aliases: Mapping[str, str],
) -> list[str]:
    """What to put in front of a command.

    ``folder`` is the node's, and ``secrets`` files that no worker may read, which exist. All of
    these paths and of ``confined`` are free of links; ``aliases`` are other names by which some
    will be asked for.
    """
    words = [containment.program, "--die-with-parent", "--new-session"]
    words += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += [] if confined.network else ["--unshare-net"]
    if not containment.is_switching:
        words += ["--unshare-user"]
    # Strangers' code has a first process above it, as the kernel spares a first process most
    # signals, a timer's too. An engine is its own, and its CPU is counted as the node's.
    words += ["--as-pid-1"] if confined.sees_machine else []
    words += ["--cap-drop", "ALL"]
    if containment.is_switching and not confined.sees_machine:
        words += [word for capability in SWITCHING for word in ("--cap-add", capability)]
    if confined.sees_machine:
        words += _machine(confined, installation, folder, aliases)
        seen: Sequence[str] = ("/",)
    else:
        words += _nothing(confined, installation, folder, aliases)
        seen = (*_shown(installation), *confined.readable, *confined.writable)
    for secret in secrets:
        if is_below(secret, seen):
            words += ["--ro-bind", "/dev/null", secret]
    if not confined.sees_machine:
        words += ["--remount-ro", folder] if _is_covered(folder, installation) else []
        words += ["--remount-ro", "/"]
    return [*words, "--chdir", "/", "--"]


def _nothing(
    confined: Confinement, installation: Installation, folder: str, aliases: Mapping[str, str]
) -> list[str]:
    """An empty machine with what Python needs, and what was given."""
    shown = _shown(installation)
    given = [*confined.readable, *confined.writable]
    words = _scratch("/tmp", confined.scratch)
    words += _parents([*shown, *given, *aliases])
    words += _bind("--ro-bind", shown)
    for link, target in installation.links:
        words += ["--symlink", target, link]
    if _is_covered(folder, installation):
        words += ["--perms", "0755", "--tmpfs", folder, *_parents([*given, *aliases], [folder])]
    words += [*_processes(), "--tmpfs", FIRST_PROCESS, "--remount-ro", FIRST_PROCESS]
    words += ["--dir", "/dev"]
    for device in PLAIN_DEVICES:
        words += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return words + _given(confined, aliases)


def _shown(installation: Installation) -> list[str]:
    """The paths that every worker sees."""
    return [*installation.system, *installation.readable]


def _is_covered(folder: str, installation: Installation) -> bool:
    """Whether the node's folder must be covered, as it lies in what every worker sees: a
    container's ``/usr/src/app/data``. Not if Python, or what it imports, is in it."""
    needed = (installation.python, *installation.search)
    return is_below(folder, _shown(installation)) and not any(
        is_below(path, [folder]) for path in needed
    )


def _machine(
    confined: Confinement, installation: Installation, folder: str, aliases: Mapping[str, str]
) -> list[str]:
    """This machine, without what is others', and what was given."""
    private = installation.private
    words = ["--ro-bind", "/", "/", "--dev", "/dev", *_processes()]
    for device in installation.devices:
        words += ["--dev-bind-try", device, device]
    for place in private:
        words += _scratch(place, confined.scratch)
    lost = {alias: path for alias, path in aliases.items() if is_below(alias, private)}
    kept = [path for path in (*installation.readable, folder) if is_below(path, private)]
    given = [*confined.readable, *confined.writable]
    words += _parents([*kept, *given, *lost], below=private)
    words += _bind("--ro-bind", kept)
    words += _bind("--ro-bind-try", DRIVERS)
    return words + _given(confined, lost)


def _given(confined: Confinement, aliases: Mapping[str, str]) -> list[str]:
    words = _bind("--ro-bind-try", confined.readable)
    words += _bind("--bind", confined.writable)
    for alias, path in aliases.items():
        kind = "--bind" if path in confined.writable else "--ro-bind-try"
        words += [kind, path, alias]
    return words


def _processes() -> list[str]:
    """``/proc`` of the worker's own machine, without what steers the kernel of this one.

    ``bwrap`` covers that itself, but not for root in a user namespace: it asks whether the
    folder can be written, which root may not, while the files in it belong to root.
    """
    return ["--proc", "/proc", *_bind("--ro-bind-try", KERNEL_FILES)]


def _bind(kind: str, paths: Iterable[str]) -> list[str]:
    return [word for path in paths for word in (kind, path, path)]


def _scratch(path: str, size: int) -> list[str]:
    """A folder in memory that every user may write into."""
    return ["--perms", "1777", "--size", str(size), "--tmpfs", path]


def _parents(paths: Iterable[str], below: Iterable[str] = ("/",)) -> list[str]:
    """Make the folders above each path, so that every user can go through them: those that
    ``bwrap`` makes by itself are its own user's alone."""
    below = tuple(below)
    folders = dict.fromkeys(
        parent
        for path in paths
        for parent in reversed(_ancestors(path))
        if is_below(parent, below) and parent not in below
    )
    return [word for folder in folders for word in ("--perms", "0755", "--dir", folder)]


def _ancestors(path: str) -> list[str]:
    """Nearest first, without the root."""
    found = []
    while (path := posixpath.dirname(path)) != "/":
        found.append(path)
    return found
