"""The figures of a whole swarm, from the statuses of its nodes.

Commands show them, and simulations measure by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2p.naming import printable

MAX_GUESTS = 8  # with a row each: more would push the rest off a terminal of 24 lines
MAX_WELCOMES = 96  # identities cost little, and each welcome is a line
Status = Mapping[str, Any]
"""Status that `p2p.node` prints (``--status``), or that `Node.health` returns in a
simulation.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A node of the run that another shell, or another machine, has started."""

    peer: str
    roles: tuple[str, ...]
    policy: int = -1
    """The newest that it says it holds."""
    accepted: int = 0
    """Accepted submissions, over all validators."""
    rejected: int = 0

    @property
    def name(self) -> str:
        """A short name for a table: the end of the peer id tells guests apart."""
        return f"guest-{self.peer[-4:]}"


@dataclass(frozen=True, slots=True)
class SwarmStatus:
    """The newest status of every node of a run, by the node's name (``inference-1``)."""

    nodes: Mapping[str, Status]
    completions: int
    """Per submission: groups times completions."""

    def role(self, role: str) -> list[Status]:
        """Return the healths of a role on all nodes that have it."""
        return [
            status["roles"][role] for status in self.nodes.values() if role in status["roles"]
        ]

    def peers_with(self, role: str) -> list[str]:
        """Return the ids of the nodes that have that role."""
        return [
            str(status["peer"]) for status in self.nodes.values() if role in status["roles"]
        ]

    @property
    def trainer(self) -> Status:
        """The trainer's health; empty before there is one."""
        return next(iter(self.role("trainer")), {})

    @property
    def learner(self) -> str:
        """Digest of the trainer's learning settings; empty if it has not sent one."""
        return str(self.trainer.get("learner", ""))

    @property
    def judgements(self) -> list[tuple[str, Status]]:
        """Each peer that the trainer or a validator has judged, with its counts."""
        judges = (*self.role("validator"), *self.role("trainer"))
        return [one for health in judges for one in health.get("nodes", {}).items()]

    def judged(self, peers: Sequence[str], outcome: str) -> int:
        """Return the number of these peers' places with this outcome, over all scorers."""
        return sum(record[outcome] for peer, record in self.judgements if peer in peers)

    @property
    def bans(self) -> dict[str, Status]:
        """Maps each banned worker, by its name here or its id, to its ban."""
        names = {status["peer"]: name for name, status in self.nodes.items()}
        return {
            names.get(peer, peer): ban
            for health in self.role("trainer")
            for peer, ban in health.get("bans", {}).items()
        }

    @property
    def guests(self) -> list[Guest]:
        """The peers that have joined beside the nodes that were started here."""
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
    def editions(self) -> str:
        """A sentence if nodes follow different editions of the run file; else empty."""
        found: dict[int, list[str]] = {}
        for name, status in self.nodes.items():
            found.setdefault(status.get("epoch", 0), []).append(name)
        if len(found) < 2:
            return ""
        each = (f"epoch {epoch} by {', '.join(found[epoch])}" for epoch in sorted(found))
        return f"{len(found)} editions of the run file are followed: {'; '.join(each)}"

    @property
    def done(self) -> bool:
        """Return True if the trainer has all its steps and every node its last policy."""
        trainer = self.trainer
        return bool(trainer.get("done")) and all(
            status["shardcast"]["newest"] >= trainer["step"] for status in self.nodes.values()
        )

    def figures(self) -> dict[str, Any]:
        """Return the figures of the run: rewards, rollouts, bans, and the traffic of
        policies."""
        trainer = self.trainer
        honest, cheaters = self.peers_with("inference"), self.peers_with("cheat")
        origins, leaves = list[Status](), list[Status]()
        for status in self.nodes.values():
            (origins if "trainer" in status["roles"] else leaves).append(status["shardcast"])
        from_peers = sum(stats["from_peers"] for stats in leaves)
        received = from_peers + sum(stats["from_origin"] for stats in leaves)
        accepted = self.judged(honest + cheaters, "accepted")
        told = sum(health["life"]["accepted"] for health in self.role("inference"))
        caught = self.judged(cheaters, "rejected")
        bans = [ban["times"] for name, ban in self.bans.items() if name.startswith("cheat")]
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
            "rollouts_accepted": max(accepted * self.completions, told),
            "rollouts_rejected": self.judged(honest + cheaters, "rejected") * self.completions,
            "cheater_submitted": self.judged(cheaters, "accepted") + caught,
            "cheater_accepted": self.judged(cheaters, "accepted"),
            "cheater_bans": max(bans, default=0),
            "honest_rejected": self.judged(honest, "rejected"),
            "policy_bytes": trainer.get("policy_bytes"),
            "origin_upload_bytes": sum(stats["uploaded_as_origin"] for stats in origins),
            "leaf_share_from_peers": round(from_peers / max(1, received), 4),
        }

    def answers(self) -> dict[str, Any]:
        """Return rewards by kind and answers to read, of the first evaluation and the last."""
        trainer = self.trainer
        return {
            "kinds_start": trainer.get("kinds_start"),
            "kinds_end": trainer.get("kinds"),
            "shown_start": trainer.get("shown_start"),
            "shown_end": trainer.get("shown"),
        }


class Doorbell:
    """Announces guests to people, each fact once."""

    def __init__(self) -> None:
        self._said = set[tuple[str, str]]()

    def news(self, status: SwarmStatus) -> Iterator[str]:
        """Yield a sentence for each guest that is new, and for each first accepted work."""
        for guest in status.guests:
            jobs = ", ".join(guest.roles) or "a relay"
            lines = {"welcome": f"you are here as {jobs}, and pass the weights on"}
            if "inference" in guest.roles:
                lines["welcome"] = "your work counts as soon as the validator has judged it"
            if guest.accepted:
                rollouts = guest.accepted * status.completions
                lines["thank you"] = f"your first {rollouts:,} rollouts are accepted"
            for word, rest in lines.items():
                if (word, guest.peer) not in self._said and len(self._said) < MAX_WELCOMES:
                    self._said.add((word, guest.peer))
                    yield f"{word}, {guest.name}: {rest}"
