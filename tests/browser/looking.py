"""A real browser for tests: what it complains of, whom it asks, what is wrong with its page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
SCREENS: Final = Path(__file__).parent.parent.parent / "build" / "screens"
"""Where pictures of pages are kept."""
OVERLAPS: Final = """[...document.querySelectorAll(".card, .tiles")]
    .filter((one) => one.offsetWidth).map((one) => [one.innerText, one.getBoundingClientRect()])
    .flatMap(([text, a], place, all) => all.slice(place + 1).filter(([, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1
    && b.top < a.bottom - 1).map(([other]) => [text, other]))"""
"""Pairs of cards that lie on each other."""
SECONDS: Final = 240.0
"""For a browser to draw what it waits for: a swarm on a busy machine warms up in 100 s."""


class Look:
    """One open page."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        self._session: Any = None
        page.set_default_timeout(1000 * SECONDS)
        page.on("console", lambda one: self.complaints.append(f"{one.type}: {one.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda asked: self._note(asked.url, url))
        page.goto(url, wait_until="domcontentloaded")

    def _note(self, asked: str, url: str) -> None:
        own = url.rsplit("/", 1)[0]
        if not asked.startswith((own, "data:", "file:")):
            self.foreign.append(asked)

    def text(self, selector: str) -> str:
        """What a reader sees there."""
        return str(self.page.inner_text(selector))

    def wait(self, selector: str) -> None:
        """Until it is on the page. The page forbids what would evaluate a condition in it."""
        self.page.wait_for_selector(selector, state="attached")

    def heap(self) -> float:
        """Bytes of the page's heap after a collection."""
        if self._session is None:
            self._session = self.page.context.new_cdp_session(self.page)
            self._session.send("Performance.enable")
        self._session.send("HeapProfiler.collectGarbage")
        found = self._session.send("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in found if one["name"] == "JSHeapUsedSize"))

    def keep(self, name: str) -> None:
        """A picture of all of it, for somebody to look at: build/screens."""
        SCREENS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENS / f"{name}.png", full_page=True)

    def check_quiet(self) -> None:
        """It complained of nothing, asked nobody else, does not scroll sideways, and no card
        lies on another: the map lay on the curve once the first weights had travelled."""
        assert self.complaints == [], self.complaints
        assert self.foreign == [], self.foreign
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert self.page.evaluate(OVERLAPS) == []


@contextmanager
def looking_at(url: str, *, width: int = 1200, scheme: str = "light") -> Iterator[Look]:
    """A page that is open; skips where there is no browser, or nothing to drive it with."""
    drivers = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    with drivers.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        yield Look(context.new_page(), url)
        browser.close()
