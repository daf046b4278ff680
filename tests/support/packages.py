"""Packages of others, as pip would install them."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, module: str, source: str, group: str, **points: str) -> None:
    """Put ``module`` into ``folder``, with entry points of ``group`` by their names."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    name = module.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{point} = {target}" for point, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    (folder / f"{module}.py").write_text(source)
