"""Packages of others with entry points, as an owner of a machine would install them."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, *points: str, group: str = "shoal.envs") -> None:
    """Register a package in ``folder``, with entry points like "sort = module:Class"."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *points]) + "\n")


def install_shady(folder: Path) -> None:
    """A package with an environment whose import leaves a trace."""
    install(folder, "shady-env", "shady = shady_env.game:Game")
    package = folder / "shady_env"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "game.py").write_text(
        "from pathlib import Path\n"
        "try:\n"
        f"    Path({str(folder / 'imported')!r}).touch()\n"
        "except OSError as error:\n"
        "    print('imported, and', type(error).__name__)\n"
        "from roles.envs.sort import SortEnvironment as Game\n"
    )
