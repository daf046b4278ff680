"""Packages of others, as pip would install them."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, module: str, source: str, group: str, **points: str) -> None:
    """Put ``module`` into ``folder``, with entry points of ``group`` by their names. The module
    may be one of a package: "package/module"."""
    package = module.partition("/")[0]
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    name = package.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{point} = {target}" for point, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
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
    install(folder, "shady_env/game", source, "shoal.envs", shady="shady_env.game:Game")
    (folder / "shady_env" / "__init__.py").touch()
