"""Host headers, against DNS rebinding.

What listens on loopback is for its own machine. A web page that a person has open there is not:
its server can let its own name lead to 127.0.0.1, and the browser takes what is here for that
server's. The name in the Host header stays that server's.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Final

_HOST: Final = re.compile(r"(localhost|[\d.]{7,15}|\[[\da-fA-F:.]{2,45}\])(?::\d{1,5})?", re.A)


def machine_named(header: str) -> str | None:
    """Return the address, or localhost, that a Host header names; None for any other name."""
    match = _HOST.fullmatch(header)
    return None if match is None else match[1].strip("[]")


def is_loopback(name: str) -> bool:
    """Return True if ``name`` is an address that only this machine reaches, or localhost."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
