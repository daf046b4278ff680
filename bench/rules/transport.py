"""Rules of `p2p.transport`."""

from __future__ import annotations

from typing import Final

from bench.rules.rule import Service

SERVICE: Final = Service("transport", {})
