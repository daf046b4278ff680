"""Who plays in the demo, in processes and in its simulation (`sim.workloads.spine`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CAST: Final[Mapping[str, str]] = {
    "relay-1": "none",
    "trainer-1": "trainer",
    "validator-1": "validator",
    "inference-1": "inference",
    "inference-2": "inference",
    "cheat-1": "roles.demo.cheats:Cheat",
}
"""Who plays, by folder name; the first is the bootstrap peer of the others."""
