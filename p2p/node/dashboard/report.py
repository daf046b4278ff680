"""The page as one file: nothing to fetch, nothing to serve, the data inside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any, Final

from p2p.node.dashboard.app import read_part

_STYLES: Final = ("uPlot.min.css", "page.css")
_SCRIPTS: Final = ("uPlot.iife.min.js", "draw.js", "page.js")
_LINKS: Final = re.compile(r"\s*<(?:link rel=\"stylesheet\"|script src=)[^>]*>(?:</script>)?")
_DATA: Final = "data"
"""The id of the element that holds what a live page is sent."""


def write_report(whole: dict[str, Any]) -> str:
    """The page with ``whole``, as `Feed.whole` gives it."""
    page = _LINKS.sub("", read_part("index.html").decode())
    style = "\n".join(read_part(name).decode() for name in _STYLES)
    scripts = [read_part(name).decode() for name in _SCRIPTS]
    rule = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none';"
        f" style-src {_digest(style)}; script-src {' '.join(map(_digest, scripts))}"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{rule}">\n'
        f"<style>{style}</style>\n</head>"
    )
    # Inside of a script element only the sign that ends it has a meaning to HTML.
    data = json.dumps(whole).replace("<", "\\u003c")
    tail = f'<script type="application/json" id="{_DATA}">{data}</script>\n'
    tail += "".join(f"<script>{script}</script>\n" for script in scripts)
    return page.replace("</head>", head, 1).replace("</body>", tail + "</body>", 1)


def _digest(text: str) -> str:
    """How a policy names an inline script or style that may be used."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
