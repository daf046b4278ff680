"""The profile of ``sandbox-exec``, which says what macOS lets a worker do.

Text out of values. The language is Apple's and unpublished; what is written here is what its
own profiles and those of browsers use. The last rule that matches decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from p2p.sandbox.confinement import Confinement
from p2p.sandbox.installation import Installation

ALWAYS: Final = (
    "(version 1)",
    "(deny default)",
    "(allow process-exec)",
    "(allow signal (target self))",
    "(allow sysctl-read)",
    '(allow file-read-metadata (literal "/"))',
    '(allow file-read* (literal "/dev/null") (literal "/dev/zero")'
    ' (literal "/dev/random") (literal "/dev/urandom"))',
    '(allow file-write-data (literal "/dev/null"))',
    '(allow mach-lookup (global-name "com.apple.system.opendirectoryd.libinfo"))',
)
"""Rules that every Python process needs to start."""
SYSTEM: Final = (
    "/System", "/usr/lib", "/usr/share", "/Library/Apple", "/Library/Frameworks",
    "/private/var/db/dyld", "/private/var/db/timezone",
)  # fmt: skip
"""Libraries and their caches, read-only on the disk as well."""
GRAPHICS: Final = ("(allow iokit-open)", "(allow mach-lookup)", "(allow ipc-posix-shm)")
"""Services that Metal talks to."""


def seatbelt_profile(
    confined: Confinement, installation: Installation, *, secrets: Sequence[str]
) -> str:
    """The rules for one worker. All paths are free of links, as the kernel compares them."""
    rules = list(ALWAYS)
    rules += ["(allow process-fork)"] if confined.forks else []
    rules += ["(allow network*)", "(allow system-socket)"] if confined.network else []
    if confined.sees_machine:
        rules += [*GRAPHICS, "(allow file-read*)"]
        rules += [f"(deny file-read* {_below(installation.private)})"]
    rules += [f"(allow file-read* {_below([*SYSTEM, *installation.readable])})"]
    if confined.readable:
        rules += [f"(allow file-read* {_below(confined.readable)})"]
    if confined.writable:
        rules += [f"(allow file-read* file-write* {_below(confined.writable)})"]
        rules += ["(deny file-write-create (vnode-type SYMLINK))"]  # the node would follow it
    if secrets:
        rules += [f"(deny file-read* file-write* {_below(secrets)})"]
    return "\n".join(rules) + "\n"


def _below(paths: Iterable[str]) -> str:
    return " ".join(f"(subpath {_quoted(path)})" for path in paths)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
