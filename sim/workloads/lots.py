"""A run in which work is committed to before it is seen, and a lot says what is checked. (L1)

A trainer, a few validators and workers, all honest, with the fake engine. The metrics are what
lots are for: how much of the work validators replay once everybody is in standing, what that
costs them beside what it costs to draw it, and what a place costs the network that nobody asks
for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from roles.engines.config import DeviceProfile
from roles.rl.recipe import Recipe
from roles.run import Run, sign_run
from roles.run.core.trust import TrustTerms
from sim.node.swarm import Swarm
from sim.run.scenario import Scenario
from sim.workloads.spine import Spine

CAST: Final = {
    "relay-1": "none",
    "trainer-1": "trainer",
    **{f"validator-{number}": "validator" for number in range(1, 4)},
    **{f"inference-{number}": "inference" for number in range(1, 5)},
}
"""Who plays."""


class Lots(Spine):
    """The spine with lots."""

    parameters: ClassVar[Sequence[str]] = (
        "steps",
        "groups",
        "group_size",
        "submission",
        "kill_at_step",
        "down_seconds",
        "share",
        "probation",
        "window",
        "validators",
        "beacon",
    )

    def __init__(self, cast: Mapping[str, str] = CAST) -> None:
        super().__init__(cast)
        self.trust = TrustTerms()

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Play until all nodes hold the last policy, or the duration is over."""
        plain = TrustTerms()
        self.trust = TrustTerms(
            share=scenario.parameter("share", plain.share),
            probation=int(scenario.parameter("probation", plain.probation)),
            window=int(scenario.parameter("window", plain.window)),
            validators=int(scenario.parameter("validators", plain.validators)),
            beacon=scenario.parameter("beacon", plain.beacon),
        )
        metrics = await super().run(swarm, scenario)
        return {**metrics, **self._figures(int(scenario.parameter("group_size", 8)))}

    def make_run(self, swarm: Swarm, recipe: Recipe) -> Run:
        """Three validators, and `trust`."""
        keys = swarm.simulation.keys
        judges = tuple(keys.signer(name).peer_id for name in self._cast if "valid" in name)
        terms = replace(
            super().make_run(swarm, recipe).terms, validators=judges, trust=self.trust
        )
        return sign_run(terms, keys.signer("owner"))

    def _roles(self, role: str) -> list[Mapping[str, Any]]:
        nodes = self.health().values()
        return [node["roles"][role] for node in nodes if role in node["roles"]]

    def _figures(self, group_size: int) -> dict[str, float]:
        workers, judges = self._roles("inference"), self._roles("validator")
        (trainer,) = self._roles("trainer")
        made = sum(one["life"]["made"] for one in workers) / group_size
        tokens = sum(one["life"]["tokens"] for one in workers)
        checked = sum(one["accepted"] + one["rejected"] for one in judges)
        newcomers = len(workers) * self.trust.probation
        each, profile = tokens / max(1.0, made), DeviceProfile()
        drawing = tokens / profile.generate_rate
        drawn = checked / self.trust.validators - newcomers
        share = drawn / max(1.0, made - newcomers)
        ratio = profile.generate_rate / profile.score_rate
        return {
            "places": made,
            "drawn_share": round(share, 4),
            "validators_spend": round(share * self.trust.validators * ratio, 4),
            "trainer_spends": round(
                trainer["groups_scored"] * each / profile.score_rate / drawing, 4
            ),
            "commitment_bytes": round(sum(one["committed_bytes"] for one in workers) / made),
            "unsent_share": round(
                sum(one["life"]["unchecked"] for one in workers) / (made * group_size), 4
            ),
            "stale_share": round(
                sum(one["life"]["inconclusive"] for one in workers) / (made * group_size), 4
            ),
            "windows_void": trainer["windows_void"],
            "windows_missed": trainer["windows_missed"],
        }
