"""What the README shows works as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_embedding_example_echoes(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert re.fullmatch(r"hello from 12D3Koo\w+\n", done.stdout), done.stderr


def test_links_lead_somewhere() -> None:
    root = Path(__file__).parent.parent.parent
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (root / link).exists(), link
