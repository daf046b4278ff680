"""The page: its files, as a browser asks for them, and all of it in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

PARTS: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/draw.js": ("draw.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uPlot.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}
"""Maps each path to a file of the page and its media type."""


@cache
def read_part(name: str) -> bytes:
    """Return a file of the page, both in a checkout and in a wheel."""
    return (files("p2p.node.dashboard") / "static" / name).read_bytes()


def write_report(whole: dict[str, Any]) -> str:
    """Return the page as one file with ``whole``, as returned by `Snapshots.whole`. It needs no
    server."""
    return write_file("index.html", ("draw.js", "page.js"), {"data": whole})


def write_file(name: str, scripts: Sequence[str], data: Mapping[str, object]) -> str:
    """Return the page ``name`` as one file with its scripts. ``data`` is embedded as JSON
    elements with its keys as ids."""
    links = r"\s*<(?:link rel=\"stylesheet\"|script src=)[^>]*>(?:</script>)?"
    page = re.sub(links, "", read_part(name).decode())
    style = "\n".join(read_part(part).decode() for part in ("uPlot.min.css", "page.css"))
    code = [read_part(part).decode() for part in ("uPlot.iife.min.js", *scripts)]
    rule = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none';"
        f" style-src {_digest(style)}; script-src {' '.join(map(_digest, code))}"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{rule}">\n'
        f"<style>{style}</style>\n</head>"
    )
    # Inside of a script element only the sign that ends it has a meaning to HTML.
    texts = {key: json.dumps(value).replace("<", "\\u003c") for key, value in data.items()}
    tail = "".join(
        f'<script type="application/json" id="{key}">{text}</script>\n'
        for key, text in texts.items()
    )
    tail += "".join(f"<script>{script}</script>\n" for script in code)
    return page.replace("</head>", head, 1).replace("</body>", tail + "</body>", 1)


def _digest(text: str) -> str:
    """Return the source expression by which a content security policy allows one inline script
    or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
