"""The documents as a site, in a browser: whole, quiet, and as wide as the screen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import p2p
import proofs
import sim
from tests.browser.access import check_accessible
from tests.browser.looking import looking_at

ROOT = Path(__file__).parent.parent.parent
PAGES = ("index", "errors", "tutorials/fifteen-minutes", "reference/p2p", "architecture")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as ``make docs`` builds it: a warning fails."""
    pytest.importorskip("sphinx", reason="sphinx is not installed")
    out = tmp_path_factory.mktemp("site")
    where = ["-c", "docs/site", "-d", str(out / "doctrees"), ".", str(out / "site")]
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return out / "site"


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_the_screen_and_asks_nobody(
    site: Path, page: str, width: int, scheme: str
) -> None:
    with looking_at(
        (site / "docs" / f"{page}.html").as_uri(), width=width, scheme=scheme
    ) as look:
        look.wait("article h1")
        assert look.page.locator("pre:not([tabindex])").count() == 0
        look.keep(f"site-{page.replace('/', '-')}-{width}-{scheme}")
        look.check_quiet()
        check_accessible(look.page)


def test_the_reference_has_all_that_the_packages_offer(site: Path) -> None:
    """What `p2p` imports on first use was missing from it."""
    for package in (p2p, proofs, sim):
        name = package.__name__
        text = (site / "docs" / "reference" / f"{name}.html").read_text("utf-8")
        assert [one for one in package.__all__ if f'id="{name}.{one}"' not in text] == []
