"""Versions of a policy, as heartbeats and SHARDCAST both number them.

A node says in its heartbeat which version it holds, SHARDCAST moves that version, and neither
service imports the other: what they have in common stands here.
"""

from __future__ import annotations

from typing import Final, NewType

PolicyVersion = NewType("PolicyVersion", int)
"""The optimiser step that produced a set of weights. It never decreases."""

NO_POLICY: Final = PolicyVersion(-1)
"""The version of a node that has no policy yet."""

MAX_POLICY: Final = 2**31 - 1
"""The highest version, which a heartbeat's digest carries as a signed 32-bit number. At a
version a second it lasts 68 years."""
