"""Files that Python needs to run on this machine: libraries and packages.

Theory of operation
-------------------
A worker must be able to import what its node can, and read nothing else. Installations are in
many places (the system's, pyenv and uv below a home, conda, a virtual environment in a
checkout), so it is the running interpreter that is asked. Of a prefix the folders of an
installation count, not the prefix itself, which may be a home. Of a folder that is merely on
the path (a checkout, ``PYTHONPATH``) only what can be imported is shown: beside it may lie keys
and data. What Python puts first, the current folder or a script's, does not count at all.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from p2p.sandbox.confinement import is_below

PACKAGES: Final = ("site-packages", "dist-packages")
"""Folders that hold nothing but packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The paths of this machine that a worker needs, all absolute."""

    python: str
    """The path of the interpreter."""

    system: tuple[str, ...]
    """Folders and files of the operating system."""

    links: tuple[tuple[str, str], ...]
    """Symbolic links among them, with their targets as written."""

    readable: tuple[str, ...]
    """Python's own files and folders, and packages."""

    search: tuple[str, ...]
    """Folders on the import path that Python does not find by itself."""

    private: tuple[str, ...]
    """Folders that hold the secrets of a person or a program: homes, and places of sockets."""

    devices: tuple[str, ...]
    """Device files of accelerators."""


def find_installation() -> Installation:
    """Return the installation of the running Python."""
    prefixes = _both({sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix})
    python = sys.executable
    parts = ("bin", "lib", "lib32", "lib64", "Frameworks", "Resources", "pyvenv.cfg")
    found = [os.path.join(prefix, part) for prefix in prefixes for part in parts]
    found += _chain(python)
    search = _searched()
    paths = list(dict.fromkeys([*_on_path(), *search]))
    packages = [path for path in paths if os.path.basename(path) in PACKAGES]
    found += _both([*site.getsitepackages(), site.getusersitepackages(), *packages])
    roots = [path for path in paths if not is_below(path, found)]
    found += [entry for root in roots for entry in _importable(root)]
    present = [path for path in dict.fromkeys(found) if os.path.lexists(path)]
    # Folders of the operating system, which are links on systems with a merged ``/usr``; the
    # folders of the loader's libraries, and those that links to them pass through; the
    # read-only stores of Nix and Guix.
    places = (
        "/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin",
        "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives",
        "/nix/store", "/gnu/store",
    )  # fmt: skip
    system = [path for path in places if os.path.exists(path)]
    present += _library_folders([*present, *system])
    # Folders in which other programs listen and leave files.
    sockets = ("/run", "/var/run", "/tmp", "/var/tmp")
    # Devices with which engines compute: flatpak's list, and those of data centres.
    accelerators = (
        "accel*", "dri", "dxg", "gdrdrv", "infiniband", "kfd", "mali*", "nvhost*", "nvidia*",
        "nvgpu", "nvmap", "udmabuf",
    )  # fmt: skip
    return Installation(
        python=python,
        system=tuple(path for path in system if not os.path.islink(path)),
        links=tuple((path, os.readlink(path)) for path in system if os.path.islink(path)),
        readable=_outermost(path for path in present if not is_below(path, system)),
        search=tuple(search),
        private=_outermost(
            os.path.realpath(path) for path in (*_homes(), *sockets) if os.path.isdir(path)
        ),
        devices=tuple(
            str(path) for name in accelerators for path in sorted(Path("/dev").glob(name))
        ),
    )


def _both(paths: Iterable[str]) -> list[str]:
    """Return each path as named and as resolved, since either may be used."""
    named = [os.path.abspath(path) for path in sorted(paths)]
    return list(dict.fromkeys([*named, *(os.path.realpath(path) for path in named)]))


def _chain(path: str) -> Iterator[str]:
    """Return a file and the links on the way to it."""
    # Most links followed on the way to a file, as in Linux.
    for _ in range(40):
        yield path
        if not os.path.islink(path):
            break
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    yield os.path.realpath(path)


def _searched() -> list[str]:
    """Return the entries of ``PYTHONPATH`` and the folder of ``p2p``. Python finds all others
    by itself."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = str(Path(__file__).absolute().parents[2])
    folders = [os.path.abspath(path) for path in named if path]
    folders += [own] if os.path.basename(own) not in PACKAGES else []
    return [path for path in dict.fromkeys(folders) if path == own or _is_public(path)]


def _is_public(path: str) -> bool:
    """Return True if the path exists, is no home, and contains none."""
    return os.path.exists(path) and not any(is_below(home, [path]) for home in _homes())


def _on_path() -> list[str]:
    """Return the folders and archives that this process imports from, except what Python puts
    first."""
    paths = list(sys.path)
    if paths and any(_is_same(paths[0], place) for place in ("", os.path.dirname(sys.argv[0]))):
        del paths[0]  # where the command was given, or its script lies: `-P` does without
    return [os.path.abspath(path) for path in paths if path and _is_public(path)]


def _is_same(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path or ".", other or ".")
    except OSError:
        return False


def _importable(root: str) -> Iterator[str]:
    """Return the modules, packages and metadata (`importlib.metadata`) directly in ``root``."""
    if not os.path.isdir(root):
        yield root  # an archive
        return
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                is_package = os.path.exists(os.path.join(entry.path, "__init__.py"))
                if is_package or entry.name.endswith((".dist-info", ".egg-info")):
                    yield entry.path
            elif entry.name.endswith((".py", ".so")):
                yield entry.path


def _library_folders(known: list[str]) -> list[str]:
    """Return the folders of libraries that this process has mapped and that lie elsewhere."""
    try:
        text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:  # macOS: there the system's loader reads its own cache
        return []
    lines = text.splitlines()
    files = {line[line.index("/") :] for line in lines if "/" in line and ".so" in line}
    return sorted(
        {
            os.path.dirname(file)
            for file in files
            if os.path.isfile(file) and not is_below(os.path.realpath(file), known)
        }
    )


def _homes() -> tuple[str, ...]:
    """Return this user's home by both names, and the parent folders of other homes. The root is
    no home, though containers give it to users without a name."""
    home = os.path.expanduser("~")
    own = [path for path in _both([home]) if path != "/"]
    return tuple(dict.fromkeys([*own, "/home", "/root"]))


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the folders without those that lie inside others, shortest first."""
    kept: list[str] = []
    for path in sorted(dict.fromkeys(paths), key=lambda path: (path.count("/"), path)):
        if not is_below(path, kept):
            kept.append(path)
    return tuple(kept)
