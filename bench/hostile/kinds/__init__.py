"""The kinds of attack on a live node, by name. Each runs until it is cancelled, in a process of
its own.
"""

from __future__ import annotations

from bench.hostile.kinds import corners, door, messages, muxer, services
from bench.hostile.kinds.registry import KINDS, Kind

__all__ = ["KINDS", "Kind", "corners", "door", "messages", "muxer", "services"]
