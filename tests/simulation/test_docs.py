"""docs/cookbook/simulate.md: its program runs, is deterministic and as short as it claims."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs" / "cookbook" / "simulate.md"


def example() -> str:
    found = re.search(
        r"<!-- file: rumour.py -->\n```python\n(.*?)```", DOCS.read_text(), re.DOTALL
    )
    assert found is not None
    return found.group(1)


def run(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, str(DOCS), "exec"), {"__name__": "example"})
    return out.getvalue()


def test_the_example_simulates_a_protocol_of_its_own_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = run(example())
    share = re.match(r"(\d+)% of the living know the newest rumour", text)
    assert share is not None
    assert 50 <= int(share.group(1)) <= 100
    assert run(example()) == text
    page = (tmp_path / "rumour.html").read_text(encoding="utf-8")
    report = re.search(r'id="report">(.*?)</script>', page, re.DOTALL)
    assert report is not None
    _, chart = json.loads(report.group(1))["charts"]
    assert len(chart["lines"][0]["points"]) == 30, "a point every ten seconds"
    assert "share of the living that know the newest rumour" in page
