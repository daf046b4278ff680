"""Packages of others with entry points, as an owner of a machine would install them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)


def install(folder: Path, name: str, *points: str, group: str = "shoal.envs") -> None:
    """Register a package in ``folder``, with entry points like "sort = module:Class"."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *points]) + "\n")


def install_module(folder: Path, module: str, source: str, group: str, **points: str) -> None:
    """Put ``module``, perhaps "package/module", into ``folder`` with entry points."""
    name = module.partition("/")[0].replace("_", "-")
    install(folder, name, *(f"{one} = {target}" for one, target in points.items()), group=group)
    path = folder / f"{module}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)


def install_shady(folder: Path) -> None:
    """A package with an environment whose import leaves a trace."""
    source = (
        "from pathlib import Path\n"
        "try:\n"
        f"    Path({str(folder / 'imported')!r}).touch()\n"
        "except OSError as error:\n"
        "    print('imported, and', type(error).__name__)\n"
        "from roles.envs.sort import SortEnvironment as Game\n"
    )
    install_module(folder, "shady_env/game", source, "shoal.envs", shady="shady_env.game:Game")
    (folder / "shady_env" / "__init__.py").touch()
