"""The figures of a whole swarm, from what its nodes say of themselves.

For the demo and for simulations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from roles.shared.reasons import printable

MAX_GUESTS: Final = 8
"""Guests with a row: more would push the rest off a terminal of 24 lines."""
Status = Mapping[str, Any]
"""What `p2p.node` prints of a node (``--status``), or `Node.health` returns in a simulation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A node of the run that another shell, or another machine, has started."""

    peer: str
    roles: tuple[str, ...]
    policy: int = -1
    """The newest that it says it holds."""
    accepted: int = 0
    """Submissions, over all validators."""
    rejected: int = 0

    @property
    def name(self) -> str:
        """For a table: the end of its id tells it from others."""
        return f"guest-{self.peer[-4:]}"


@dataclass(frozen=True, slots=True)
class SwarmStatus:
    """The newest status of every node of a run, by the node's name (``inference-1``)."""

    nodes: Mapping[str, Status]
    completions: int
    """Per submission: groups times completions."""

    def role(self, role: str) -> list[Status]:
        """Healths of that role, over all nodes that have it."""
        return [
            status["roles"][role] for status in self.nodes.values() if role in status["roles"]
        ]

    def peers_with(self, role: str) -> list[str]:
        """Who has that role."""
        return [
            str(status["peer"]) for status in self.nodes.values() if role in status["roles"]
        ]

    @property
    def trainer(self) -> Status:
        """The trainer's health; empty before there is one."""
        return next(iter(self.role("trainer")), {})

    @property
    def told(self) -> int:
        """Rollouts of which honest workers were told that they were accepted."""
        return sum(health["life"]["accepted"] for health in self.role("inference"))

    def judged(self, peers: Sequence[str], outcome: str) -> int:
        """Places of these peers with this outcome, by the trainer and all validators."""
        return sum(
            record[outcome]
            for health in (*self.role("validator"), *self.role("trainer"))
            for peer, record in health.get("nodes", {}).items()
            if peer in peers
        )

    @property
    def bans(self) -> dict[str, Status]:
        """What is known of banned workers, by their names here, or their ids."""
        names = {status["peer"]: name for name, status in self.nodes.items()}
        return {
            names.get(peer, peer): ban
            for health in self.role("trainer")
            for peer, ban in health.get("bans", {}).items()
        }

    @property
    def guests(self) -> list[Guest]:
        """Who has joined beside the nodes that were started here, by what these know."""
        own = {status["peer"] for status in self.nodes.values()}
        told = (one for status in self.nodes.values() for one in status.get("known", ()))
        known = {one["peer"]: one for one in told}
        return [
            Guest(
                peer=peer,
                roles=tuple(map(printable, one["roles"])),
                policy=one["policy"],
                accepted=self.judged([peer], "accepted"),
                rejected=self.judged([peer], "rejected"),
            )
            for peer, one in sorted(known.items())
            if peer not in own
        ][:MAX_GUESTS]

    @property
    def done(self) -> bool:
        """Whether the trainer has all its steps and every node holds the last policy."""
        trainer = self.trainer
        if not trainer.get("done"):
            return False
        return all(
            status["shardcast"]["newest"] >= trainer["step"] for status in self.nodes.values()
        )

    def answers(self) -> dict[str, Any]:
        """Rewards by kind and answers to read, of the first evaluation and the last."""
        trainer = self.trainer
        return {
            "kinds_start": trainer.get("kinds_start"),
            "kinds_end": trainer.get("kinds"),
            "shown_start": trainer.get("shown_start"),
            "shown_end": trainer.get("shown"),
        }

    def _cheats(self, cheaters: Sequence[str]) -> dict[str, Any]:
        """What became of cheats, and who has banned them."""
        accepted = self.judged(cheaters, "accepted")
        bans = [ban for name, ban in self.bans.items() if name.startswith("cheat")]
        return {
            "cheater_submitted": accepted + self.judged(cheaters, "rejected"),
            "cheater_accepted": accepted,
            "cheater_bans": max((ban["times"] for ban in bans), default=0),
        }

    def figures(self) -> dict[str, Any]:
        """The demo's keys, but for seed and times."""
        trainer = self.trainer
        honest, cheaters = self.peers_with("inference"), self.peers_with("cheat")
        workers = honest + cheaters
        leaves = [
            status["shardcast"]
            for status in self.nodes.values()
            if "trainer" not in status["roles"]
        ]
        origins = [
            status["shardcast"]
            for status in self.nodes.values()
            if "trainer" in status["roles"]
        ]
        from_peers = sum(stats["from_peers"] for stats in leaves)
        from_origin = sum(stats["from_origin"] for stats in leaves)
        accepted = self.judged(workers, "accepted")
        return {
            "peers": len(self.nodes),
            "greedy_start": trainer.get("greedy_start"),
            "greedy_end": trainer.get("greedy"),
            "reward_start": trainer.get("reward_start"),
            "reward_end": trainer.get("reward"),
            "policies": max((stats["newest"] for stats in origins), default=-1) + 1,
            "policies_skipped": sum(
                health["policies_skipped"] for health in self.role("inference")
            ),
            "staleness_max": trainer.get("staleness_max"),
            "rollouts_accepted": max(accepted * self.completions, self.told),
            "rollouts_rejected": self.judged(workers, "rejected") * self.completions,
            **self._cheats(cheaters),
            "honest_rejected": self.judged(honest, "rejected"),
            "policy_bytes": trainer.get("policy_bytes"),
            "origin_upload_bytes": sum(stats["uploaded_as_origin"] for stats in origins),
            "leaf_share_from_peers": round(from_peers / max(1, from_peers + from_origin), 4),
        }
