"""Tutorials and cookbooks, followed block by block; and commands that the documents name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import ROOT, Reader

PAGES = sorted(
    path for folder in ("tutorials", "cookbook") for path in (ROOT / "docs" / folder).glob("*.md")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_that_is_to_be_followed_can_be(page: Path, tmp_path: Path) -> None:
    """Each block runs and prints what the page shows; slow ones only in a deep run."""
    assert Reader(tmp_path).follow(page) > 0
