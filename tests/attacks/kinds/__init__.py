"""The kinds of attack on a live node, by name. Each runs until it is cancelled, in a process of
its own.
"""

from __future__ import annotations

from tests.attacks.kinds import corners, door, messages, muxer, services
from tests.attacks.kinds.registry import KINDS, Kind

__all__ = ["KINDS", "Kind", "corners", "door", "messages", "muxer", "services"]
