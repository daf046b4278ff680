"""`bench/gpu.sh` with a tiny model on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


@pytest.mark.deep
def test_the_script_writes_its_table_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    page.write_text("# Results\n\nBefore.\n\n<!-- bench/gpu.sh begins -->\nold\n"
                    "<!-- bench/gpu.sh ends -->\n\nBehind.\n")  # fmt: skip
    env = {**os.environ, "SHOAL_DEVICE": "cpu", "PYTHON": sys.executable, "RESULTS": str(page)}
    env.pop("SHOAL_VLLM", None)
    done = subprocess.run(
        ["bench/gpu.sh"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    text = page.read_text()
    assert text.startswith("# Results\n\nBefore.\n\n<!-- bench/gpu.sh begins -->\n## One")
    assert text.endswith("<!-- bench/gpu.sh ends -->\n\nBehind.\n")
    assert "old" not in text
    for row in ("| engines' conformance in the sandbox, cpu | passed |",
                "| vLLM writes, torch reads | not run |",
                "| tiny, 16 rows of 4 | draw and prove, tokens |",
                "| GRPO, step |"):  # fmt: skip
        assert row in text
