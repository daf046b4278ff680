"""Swarms of the product's roles with hostile validators in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import trio

from p2p.host import Stream
from proofs.checks import Verdict
from roles.contract import Terms
from roles.contract.core.file import AdmissionRules
from roles.contract.core.trust import TrustTerms
from roles.inference.windows import Windows
from roles.protocol.core.window import SignedWindow, Submission
from roles.protocol.scorer import Ruling
from roles.validator.role import Validator
from roles.validator.session import ValidatorSession
from sim.node.swarm import Swarm

TRUST = TrustTerms(share=0.25, probation=8, window=4)
"""Rules under which a newcomer comes to standing within a test."""
FORGER = "tests.simulation.test_roles_faults:Truncated"


class SilentSession(ValidatorSession):
    async def judge(self, submission: Submission) -> Ruling:
        await trio.sleep_forever()
        raise AssertionError


class Silent(Validator):
    """Takes content and says nothing."""

    session_type: ClassVar[type[ValidatorSession]] = SilentSession


class DeafSession(ValidatorSession):
    async def serve(self, stream: Stream) -> None:
        await trio.sleep_forever()


class Deaf(Validator):
    """Never even replies."""

    session_type: ClassVar[type[ValidatorSession]] = DeafSession


def given_up(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count, from now on, why honest workers give places up."""
    reasons: Counter[str] = Counter()
    settle = Windows._settle

    async def settled(
        self: Windows, window: SignedWindow, index: int, verdict: Verdict, *rest: Any
    ) -> None:
        if verdict is Verdict.INCONCLUSIVE and self._node.world.name.startswith("inference"):
            reasons[rest[0]] += 1
        await settle(self, window, index, verdict, *rest)

    monkeypatch.setattr(Windows, "_settle", settled)
    return reasons


def cast_of(*, workers: int, **validators: type[Validator]) -> dict[str, str]:
    named = {
        f"validator-{name}": f"{kind.__module__}:{kind.__name__}"
        for name, kind in validators.items()
    }
    inference = {f"inference-{number}": "inference" for number in range(1, workers + 1)}
    return {"relay-1": "none", "trainer-1": "trainer", **named, **inference}


def with_one_listed(trust: TrustTerms) -> Callable[[Swarm, Terms], Terms]:
    """One worker is in standing from the start, so that versions go on."""

    def change(swarm: Swarm, terms: Terms) -> Terms:
        first = swarm.simulation.keys.signer("inference-1").peer_id
        return replace(terms, admission=AdmissionRules(allowed=(first,)), trust=trust)

    return change
