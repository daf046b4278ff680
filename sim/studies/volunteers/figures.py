"""Metrics of the volunteers' run: use of time, broadcasts, rollouts, costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from p2p.node.role import Role
from p2p.shardcast import Shardcast
from roles.inference import Inference
from roles.trainer import Trainer
from roles.validator import Validator
from sim.faults.churn import HOUR
from sim.net.fabric import Endpoint
from sim.net.link import MBIT
from sim.node.swarm import Swarm
from sim.run.scenario import Scenario
from sim.studies.profiles import PREFILL_FLOPS, TRAINING_FLOPS, Machine
from sim.studies.volunteers.plan import Plan
from sim.studies.volunteers.timesheet import ENCODING, IDLE, WAITING, Timesheet
from sim.workloads.policies import percentile

Figures = dict[str, float | int | str]

VOLUNTEER: Final = "volunteer"
VALIDATOR: Final = "validator"
PERCENTILES: Final = (50, 99, 100)
"""Shares of the machines whose times a report names: half, nearly all, and the last."""
STEP_FLOPS: Final = TRAINING_FLOPS + PREFILL_FLOPS
"""Flops per parameter and token of a step: forward, backward, and the pass for the old
log-probs."""


class Journal:
    """Notes taken while the run goes on, by node."""

    def __init__(self, plan: Plan, clock: Callable[[], float]) -> None:
        self.plan = plan
        self.sheets: dict[str, Timesheet] = {}
        self.machines: dict[str, Machine] = {}
        self.lines: dict[str, Endpoint] = {}
        self.policies: dict[str, Shardcast] = {}
        """The service of each node's last life."""
        self.lives: dict[str, list[list[float]]] = {}
        """[start, end] of each; the end of a life that goes on is infinite."""
        self.roles: dict[str, list[Role]] = {}
        """Timesheet of each life that had one."""
        self.published: dict[int, float] = {}
        """Maps each version to the time at which it was published."""
        self.arrivals: dict[str, list[tuple[float, int]]] = {}
        """Pairs (time, version) of complete versions, by node."""
        self.submitted: list[tuple[float, str]] = []
        self.judged: dict[int, int] = {}
        """Accepted submissions by their staleness when judged."""
        self.cut_short = 0
        """Submissions that were being generated when their machine died."""
        self._clock = clock

    def volunteers(self) -> list[str]:
        """Return the names of all volunteers, running or not."""
        return [name for name in self.sheets if name.startswith(VOLUNTEER)]

    def validators(self) -> list[str]:
        """Return the names of all validators, running or not."""
        return [name for name in self.sheets if name.startswith(VALIDATOR)]

    def note_birth(self, name: str, roles: list[Role]) -> None:
        """Note that a life of ``name`` begins with these roles."""
        self.sheets[name].begin_life()
        self.lives.setdefault(name, []).append([self._clock(), math.inf])
        self.roles.setdefault(name, []).extend(roles)

    def note_death(self, name: str) -> None:
        """Note the end of the current life of ``name``. Its unfinished rollouts are lost."""
        self.cut_short += self.sheets[name].is_doing("generating")
        self.sheets[name].end_life()
        self.lives[name][-1][1] = self._clock()

    def note_arrival(self, name: str, version: int) -> None:
        """Note that a node has a whole version."""
        self.arrivals.setdefault(name, []).append((self._clock(), version))

    def note(self, name: str, event: str, fields: Mapping[str, Any]) -> None:
        """Record a trace of a role."""
        if event == "submitted":
            self.submitted.append((self._clock(), name))
        elif event == "published":
            self.published[fields["version"]] = self._clock()
        elif event == "verdict" and fields["verdict"] == "accepted":
            late = max(self.published) - fields["version"]
            self.judged[late] = self.judged.get(late, 0) + 1

    def restart_sheets(self) -> None:
        """Count the use of time from now on."""
        for sheet in self.sheets.values():
            sheet.restart()

    def only(self, kind: type[Role]) -> list[Any]:
        """Return all roles of a kind, of all lives."""
        return [
            role for roles in self.roles.values() for role in roles if isinstance(role, kind)
        ]

    @property
    def trainer(self) -> dict[str, Any]:
        """Return the trainer's health."""
        health: dict[str, Any] = self.only(Trainer)[0].health()
        return health


def plot(journal: Journal, swarm: Swarm) -> None:
    """Add a point to each curve of the report."""
    simulation, alive = (
        swarm.simulation,
        [n.name for n in swarm.alive if n.name.startswith(VOLUNTEER)],
    )
    newest = max(journal.published, default=-1)
    count = max(1, len(alive))
    behind = [
        newest - journal.policies[name].newest for name in alive if name in journal.policies
    ]
    generating = sum(journal.sheets[name].is_doing("generating") for name in alive)
    waiting = sum(journal.sheets[name].is_doing(WAITING) for name in alive)
    simulation.plot("volunteers alive", len(alive))
    simulation.plot("share of them that generate", generating / count)
    simulation.plot("share of them that wait for their first policy", waiting / count)
    simulation.plot(
        "versions that they are behind, mean", statistics.fmean(behind) if behind else 0
    )
    simulation.plot("policies published", newest + 1)
    simulation.plot("rollouts generated so far", len(journal.submitted) * journal.plan.rows)
    learnt = journal.trainer["groups_used"] * journal.plan.sampling.group_size
    simulation.plot("rollouts learnt from so far", learnt)
    simulation.plot("probability of a right answer", journal.trainer["reward"] or 0)


def figures(journal: Journal, swarm: Swarm, scenario: Scenario) -> Figures:
    """Return all metrics; histograms go to the report."""
    distributions = swarm.simulation.distributions
    distributions["seconds until a volunteer had a policy"] = [
        delay for _, delay in _delays(journal, scenario) if math.isfinite(delay)
    ]
    distributions["share of time generating, by volunteer"] = [
        _share(journal, [name], "generating") for name in journal.volunteers()
    ]
    distributions["staleness of groups learnt from"] = [
        float(late)
        for late, count in sorted(journal.trainer["staleness"].items())
        for _ in range(count)
    ]
    return {
        **_use_of_time(journal),
        **_journeys(journal, scenario),
        **_fates(journal),
        **_uploads(journal),
        **_learning(journal, scenario),
        **_work(journal),
        **_bill(journal, scenario),
    }


def _share(journal: Journal, names: list[str], activity: str) -> float:
    alive = sum(journal.sheets[name].alive for name in names)
    return sum(journal.sheets[name].spent(activity) for name in names) / alive if alive else 0.0


def _use_of_time(journal: Journal) -> Figures:
    """Return shares of the machines' running time by activity."""
    found: Figures = {}
    groups: dict[str, tuple[list[str], tuple[str, ...]]] = {
        "trainer": (
            ["trainer"],
            ("training", "scoring", "loading", "saving", ENCODING, IDLE),
        ),
        "validators": (
            journal.validators(),
            ("scoring", "loading", WAITING, IDLE),
        ),
    }
    for machine in journal.plan.mix:
        names = [name for name in journal.volunteers() if journal.machines[name] == machine]
        groups[str(machine)] = names, ("generating", "loading", WAITING, IDLE)
    groups["volunteers"] = journal.volunteers(), ("generating", "loading", WAITING, IDLE)
    for group, (names, activities) in groups.items():
        for activity in activities:
            found[f"{group}_{activity}"] = round(_share(journal, names, activity), 4)
    return found


def _delays(journal: Journal, scenario: Scenario) -> Iterator[tuple[str, float]]:
    """Return for each version the volunteers that ran through it, with their seconds from
    publication to arrival.

    A newer version counts as well; what never came took infinitely long. A volunteer that dies
    on the way is not waited for, and a version whose time (``patience``) was not over at the
    end is not asked for.
    """
    patience = scenario.parameter("patience", 3600)
    for version, published in journal.published.items():
        for name in journal.volunteers():
            life = next(
                (
                    life
                    for life in journal.lives.get(name, ())
                    if life[0] <= published < life[1]
                ),
                None,
            )
            if life is None:
                continue
            arrivals = (
                when
                for when, held in journal.arrivals.get(name, ())
                if held >= version and when >= published
            )
            arrived = next(arrivals, math.inf)
            if arrived <= min(life[1], scenario.duration):
                yield name, arrived - published
            elif life[1] == math.inf and scenario.duration - published >= patience:
                yield name, math.inf


def _journeys(journal: Journal, scenario: Scenario) -> Figures:
    """Return the times in which policies reached the volunteers, and the share that came from
    peers."""
    known = list(_delays(journal, scenario))
    delays = sorted(delay for _, delay in known)
    without = [journal.lines[name].spec.down for name, delay in known if delay == math.inf]
    size = journal.plan.policy_bytes
    count = max(1, len(journal.published))
    stats = [journal.policies[name].stats for name in journal.policies]
    came = max(1, sum(one.from_peers + one.from_origin for one in stats))
    done = [delay for delay in delays if math.isfinite(delay)]
    return {
        "policies": len(journal.published),
        "broadcasts_measured": len(delays),
        "broadcast_missed_share": round(1 - len(done) / max(1, len(delays)), 4),
        "broadcast_missed_widest_mbit": round(max(without, default=0.0)),
        "broadcast_seconds_mean": round(statistics.fmean(done), 1) if done else math.inf,
        **{
            f"broadcast_seconds_{percent}": round(percentile(delays, percent), 1)
            if delays
            else math.inf
            for percent in PERCENTILES
        },
        "own_line_seconds_50": round(
            statistics.median(
                size * 8 / MBIT / journal.lines[name].spec.down for name in journal.volunteers()
            ),
            1,
        ),
        "origin_policies_sent": round(journal.lines["trainer"].sent / size / count, 3),
        "from_peers_share": round(sum(one.from_peers for one in stats) / came, 4),
        "duplicate_share": round(sum(one.duplicates for one in stats) / came, 4),
    }


def _fates(journal: Journal) -> Figures:
    """Return the fates of the rollouts.

    Rollouts were too old if no scorer took them, if they came too late for the trainer, or if
    its pool dropped them. Validators judge newcomers' rollouts, from which nothing is learnt.
    """
    rows, trainer = journal.plan.rows, journal.trainer
    size = journal.plan.sampling.group_size
    validators = journal.only(Validator)
    workers = journal.only(Inference)
    on_probation = sum(one.stats.records.accepted for one in validators) * rows
    accepted = on_probation + trainer["accepted"] * rows
    stale_at_judge = (
        sum(worker.counts.verdicts.get("inconclusive", 0) for worker in workers) * rows
    )
    rejected = sum(one.stats.records.rejected for one in validators) * rows
    rejected += trainer["rejected"] * rows
    generated = len(journal.submitted) * rows
    begun = generated + journal.cut_short * rows
    stale = stale_at_judge + trainer["groups_stale"] * size
    in_a_step = sum(trainer["staleness"].values()) - trainer["groups_used"]
    fates = {
        "rollouts_learnt_from": trainer["groups_used"] * size,
        "rollouts_in_a_step_at_end": in_a_step * size,
        "rollouts_without_spread": trainer["groups_without_spread"] * size,
        "rollouts_pooled_at_end": trainer["pooled"] * size,
        "rollouts_on_probation": on_probation,
        "rollouts_rejected": rejected,
        "rollouts_lost_stale": stale,
    }
    return {
        "rollouts_generated": generated,
        "rollouts_accepted": accepted,
        **fates,
        "rollouts_unanswered_at_end": generated - sum(fates.values()),
        "rollouts_lost_cut_short": journal.cut_short * rows,
        "rollouts_lost_share": round((stale + journal.cut_short * rows) / max(1, begun), 4),
        "useful_share": round(trainer["groups_used"] * size / max(1, begun), 4),
        "policies_skipped": sum(worker.counts.policies_skipped for worker in workers),
        "retries": sum(worker.counts.retries for worker in workers),
        "deaths": sum(
            len(lives) - (lives[-1][1] == math.inf) for lives in journal.lives.values()
        ),
    }


def _uploads(journal: Journal) -> Figures:
    """Return how often a submission's content was requested."""
    uploads = sum(worker.counts.uploads for worker in journal.only(Inference))
    return {
        "uploads": uploads,
        "uploads_each": round(uploads / max(1, len(journal.submitted)), 3),
    }


def _learning(journal: Journal, scenario: Scenario) -> Figures:
    """Return the trainer's steps, the age of its rollouts, and what was learnt."""
    trainer = journal.trainer
    times = sorted(journal.published.values())
    steps = [later - earlier for earlier, later in pairwise(times)]
    by_staleness: dict[int, int] = trainer["staleness"]
    used = max(1, sum(by_staleness.values()))
    return {
        "steps": trainer["step"],
        "step_seconds_50": round(statistics.median(steps), 1) if steps else math.inf,
        "step_seconds_100": round(max(steps), 1) if steps else math.inf,
        "staleness_mean": round(
            sum(late * count for late, count in by_staleness.items()) / used, 3
        ),
        "staleness_max": max(by_staleness, default=0),
        **{
            f"staleness_{late}_share": round(by_staleness.get(late, 0) / used, 4)
            for late in range(journal.plan.sampling.lag + 1)
        },
        "staleness_when_judged_mean": round(
            sum(late * count for late, count in journal.judged.items())
            / max(1, sum(journal.judged.values())),
            3,
        ),
        "reward_start": round(trainer["reward_start"] or 0.0, 4),
        "reward_end": round(trainer["reward"] or 0.0, 4),
    }


def _work(journal: Journal) -> Figures:
    """Return the ratio of inference to training: in flops of the whole run, and in hours since
    the timesheets began.

    Hours are counted by device and weighted by peak speed: rented hours, and busy hours.
    """
    plan, trainer = journal.plan, journal.trainer
    token = plan.model.parameters
    generated = PREFILL_FLOPS * token * plan.answer * plan.rows * len(journal.submitted)
    trained = STEP_FLOPS * token * plan.step_tokens * trainer["step"]
    useful = PREFILL_FLOPS * token * plan.answer * plan.batch * trainer["step"]
    sheets, machines = journal.sheets, journal.machines
    volunteers = sum(sheets[name].alive * machines[name].flops for name in journal.volunteers())
    decoding = sum(
        sheets[name].spent("generating") * machines[name].flops for name in journal.volunteers()
    )
    site = sheets["trainer"].alive * plan.trainer.flops
    busy = sheets["trainer"].spent("training") * plan.trainer.flops
    return {
        "inference_per_training_flops": round(generated / trained, 3) if trained else math.inf,
        "useful_inference_per_training_flops": round(useful / trained, 3)
        if trained
        else math.inf,
        "inference_per_training_hours": round(volunteers / site, 3) if site else math.inf,
        "busy_inference_per_training_hours": round(decoding / busy, 3) if busy else math.inf,
    }


def _bill(journal: Journal, scenario: Scenario) -> Figures:
    """Return the cost of the machines since the timesheets began, at the scenario's prices."""

    def cost(name: str) -> float:
        machine = journal.machines[name]
        price = scenario.parameter(f"price_{machine.device.name}", 1.0)
        return journal.sheets[name].alive / HOUR * machine.count * price

    volunteers = sum(cost(name) for name in journal.volunteers())
    site = cost("trainer")
    validators = sum(cost(name) for name in journal.validators())
    hours = max(1e-9, journal.sheets["trainer"].alive / HOUR)
    return {
        "cost_per_hour": round((volunteers + site + validators) / hours, 2),
        "cost_share_volunteers": round(
            volunteers / max(1e-9, volunteers + site + validators), 4
        ),
        "cost_share_trainer": round(site / max(1e-9, volunteers + site + validators), 4),
    }
