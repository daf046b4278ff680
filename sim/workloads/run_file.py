"""The signed run of a workload whose nodes run real roles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roles.contract import Run, Terms, sign_run
from roles.contract.core.file import EnvironmentPin
from roles.contract.core.sampling import NO_SAMPLING
from roles.envs.base import environment_digest
from roles.rl.recipes import SORTING
from sim.kernel.keys import KeyRing


def write_run(keys: KeyRing, name: str, trainer: str, validator: str, **terms: Any) -> Run:
    """Return a run that never expires, learns to sort with a fake engine, and has the nodes
    ``trainer`` and ``validator``. ``terms`` are those that differ."""
    common: dict[str, Any] = {
        "environments": (EnvironmentPin(name="sort", digest=environment_digest("sort")),),
        "trainers": (keys.signer(trainer).peer_id,),
        "validators": (keys.signer(validator).peer_id,),
        "model": replace(SORTING, engine="fake"),
        "sampling": NO_SAMPLING,
    }
    return sign_run(
        Terms(name=name, expiry=2**32 - 1, **(common | terms)), keys.signer("owner")
    )
