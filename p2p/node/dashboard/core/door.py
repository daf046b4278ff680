"""Who may look at a dashboard.

Theory of operation
-------------------
It only shows, so all that can be taken is what it shows, and its few seats.

* On loopback everybody on this machine may look. A web page that a person has open elsewhere
  may not: its server can let its own name lead to 127.0.0.1 (DNS rebinding), so the Host header
  must name this machine by address or as localhost; and what a page of another site asks for in
  the background is refused by ``Sec-Fetch-Site``, which no page can set.
* Elsewhere a token is needed, a new one for each start. It comes once in the address that the
  node prints, and becomes a cookie which scripts cannot read; programs send it as a bearer.
* A socket in the node's folder is for its owner: the file's mode says so.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qs

from p2p.shardcast.http.core.hosts import is_loopback, machine_named

TOKEN_BYTES: Final = 18
"""Random bytes of a token: 144 bits, 24 characters."""
_OPEN: Final = ("/healthz", "/readyz")
"""What a supervisor asks, which has no token, and learns nothing from it but whether."""
_ELSEWHERE: Final = ("cross-site", "same-site")
"""Values of Sec-Fetch-Site: a page of another origin made the browser ask."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The request is answered; ``cookie`` is to be set first, if there is one."""

    cookie: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request is not answered."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The rule of one listening address."""

    token: str = ""
    """What has to be shown; empty on loopback, and for a socket in the node's folder."""
    name: str = ""
    """The name under which the address was given, besides addresses."""
    cookie: str = "shoal"
    """Browsers keep cookies by machine, not by port: this one's name has the port in it."""

    def judge(
        self, server: tuple[str, int | None] | None, path: str, query: str,
        headers: Mapping[str, str],
    ) -> Pass | Refusal:  # fmt: skip
        """Whether a request is answered. ``server`` is where it came in; None for a socket in
        the node's folder."""
        if server is None:
            return Pass()
        if not self._names_us(headers.get("host", ""), server[0]):
            return Refusal(421, "this machine is not called so: ask by its address")
        is_visit = path == "/" and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in _ELSEWHERE and not is_visit:
            return Refusal(403, "pages of other sites may not read this")
        if not self.token or path in _OPEN or self._has_token(headers):
            return Pass()
        shown = parse_qs(query[:256]).get("token", [""])[0]
        if path == "/" and _same(shown, self.token):
            return Pass(f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict; Path=/")
        return Refusal(401, "open the address that the node printed: it has the token in it")

    def _names_us(self, host: str, server: str) -> bool:
        if self.name and host.partition(":")[0].lower() == self.name.lower():
            return True
        name = machine_named(host)
        return name is not None and (not is_loopback(server) or is_loopback(name))

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        cookies = (one.strip().partition("=") for one in headers.get("cookie", "").split(";"))
        shown = [value for name, _, value in cookies if name == self.cookie]
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        shown += [bearer.strip()] if scheme.lower() == "bearer" else []
        return any(_same(one, self.token) for one in shown)


def _same(shown: str, token: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(shown.encode("utf-8", "replace"), token.encode())
