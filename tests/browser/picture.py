"""``python -m tests.browser.picture URL FILE [WIDTH [light|dark]]``: a picture of a page.

The one in README.md is of a demo that is half done: ``make demo`` prints the URL.
"""

from __future__ import annotations

import sys

from tests.browser.looking import looking_at

HEIGHT = 1000
"""Pixels of the picture: what a reader sees without scrolling, and a bit."""


def take(url: str, file: str, width: str = "1200", scheme: str = "light") -> None:
    """Wait until weights travel, and take it; a report (``file:``) does not move."""
    with looking_at(url, width=int(width), scheme=scheme) as look:
        look.wait("canvas")
        look.page.set_viewport_size({"width": int(width), "height": HEIGHT})
        look.wait(".flow" if url.startswith("file:") else ".flow.now")
        look.page.screenshot(path=file)
        look.check_quiet()


if __name__ == "__main__":
    take(*sys.argv[1:])
