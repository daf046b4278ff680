"""What axe-core finds wrong with a page: what keeps somebody from seeing or reaching it."""

from __future__ import annotations

from typing import Any, Final

import pytest

GRAVE: Final = {"serious", "critical"}
"""Impacts that fail a test; axe-core has two lesser ones."""


def check_accessible(page: Any) -> None:
    """Nothing grave; skips where axe-core is not installed."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    found = axe.Axe().run(page).response["violations"]
    grave = {
        one["id"]: [node["html"] for node in one["nodes"][:3]]
        for one in found
        if one["impact"] in GRAVE
    }
    assert grave == {}, grave
