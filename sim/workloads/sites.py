"""A run of one trainer's site and many volunteers: their lines and machines, and what they make of policies.

Both `sim.workloads.intellect2` workloads play on this stage with the same draws, so that a seed gives the
same lines, machines and deaths whoever distributes. Everything is stated in the scenario; nothing is fitted.

Generation is computed after the fact from when each policy was ready at each worker: a worker decodes as many
rollouts at a time as its memory holds, finishes them before it changes the policy (no sequence mixes two),
loads the newest that is ready, and goes on. A rollout counts if it is delivered at most ``max_staleness``
versions behind the newest publication; what is older, or dies with its machine, is lost. Delivery itself
(some bytes a token) is free.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2p.identity import PeerId
from sim.fabric import Endpoint, Fabric
from sim.link import MBIT, LinkSpec, drawn_link
from sim.profiles import MODELS, Machine, ModelSize, machine_named
from sim.queue import SECOND, Owner
from sim.scenario import Scenario
from sim.simulation import Simulation

MODEL = MODELS["32B"]
FILE_BYTES = 62e9
"""Bytes of one policy as published (INTELLECT-2, arXiv 2505.07291)."""
PROMPT_TOKENS = 500
"""Estimate: a mathematics or coding task with its instructions."""


@dataclass(slots=True, eq=False)
class Site:
    """One machine on the stage."""

    name: str
    peer: PeerId
    owner: Owner
    endpoint: Endpoint
    machine: Machine | None = None
    """What a worker computes on; None for the trainer's site and for relay servers."""
    died: float = math.inf
    whole: dict[int, float] = field(default_factory=dict)
    """Virtual second at which all bytes of a version were here."""
    ready: list[tuple[float, int]] = field(default_factory=list)
    """When which version could be loaded, in order."""

    @property
    def alive(self) -> bool:
        """Whether it runs now."""
        return self.owner.alive


class Stage:
    """The sites of one scenario, and the schedule of publications."""

    def __init__(self, simulation: Simulation, scenario: Scenario) -> None:
        self.simulation = simulation
        self.scenario = scenario
        self.queue = simulation.queue
        self.fabric = Fabric(simulation, lambda one, other: scenario.latency)
        self.interval = scenario.parameter("interval", 1320.0)
        self.versions = int(scenario.parameter("versions", 2))
        self.policy_bytes = scenario.parameter("policy_bytes", FILE_BYTES)
        self.origin = self._add("origin", LinkSpec(up=scenario.parameter("origin_up", 10_000.0), down=10_000.0))
        server = LinkSpec(up=scenario.parameter("relay_up", 10_000.0), down=scenario.parameter("relay_up", 10_000.0))
        self.relays = [self._add(f"relay{n}", server) for n in range(int(scenario.parameter("relays", 10)))]
        self.workers = [self._draw_worker(n) for n in range(scenario.nodes)]
        self._schedule_deaths()

    @property
    def sites(self) -> list[Site]:
        """Everybody."""
        return [self.origin, *self.relays, *self.workers]

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self.queue.now / SECOND

    def published_at(self, version: int) -> float:
        """Virtual second at which ``version`` (from 1) is published; version 0 was there before."""
        return (version - 1) * self.interval

    def version_at(self, when: float) -> int:
        """The newest version published at ``when``."""
        return min(self.versions, int(when // self.interval) + 1)

    def _add(self, name: str, link: LinkSpec) -> Site:
        owner = Owner(name)
        peer = self.simulation.keys.signer(name).peer_id
        return Site(name, peer, owner, self.fabric.add(name, owner, link))

    def _draw_worker(self, number: int) -> Site:
        scenario, rng = self.scenario, self.simulation.rng("swarm", f"worker{number}")
        uplinks = scenario.parameter("up_low", 200.0), scenario.parameter("up_high", 2000.0)
        link = drawn_link(rng, uplinks, scenario.parameter("down_factor", 2.0))
        site = self._add(f"worker{number}", link)
        dice = rng.random()
        large = scenario.parameter("share_8xH100", 0.05)
        middle = large + scenario.parameter("share_4x4090", 0.45)
        site.machine = machine_named("8xH100" if dice < large else "4x4090" if dice < middle else "4x3090")
        return site

    def _schedule_deaths(self) -> None:
        rng = self.simulation.rng("swarm", "deaths")
        count = round(self.scenario.parameter("deaths", 0.02) * len(self.workers))
        for site in rng.sample(self.workers, count):
            site.died = rng.uniform(0, self.versions * self.interval)

    def arrived(self, site: Site, version: int, usable_after: float) -> None:
        """All bytes of ``version`` are at ``site``, which can load it ``usable_after`` seconds later."""
        site.whole[version] = self.now
        site.ready.append((self.now + usable_after, version))

    # What came of it

    def distribution(self) -> dict[str, float | int | str]:
        """How long policies took, and over whose lines they went. A dead worker is not waited for."""
        alive = [site for site in self.workers if site.alive]
        delays = {version: self._delays(alive, version) for version in range(1, self.versions + 1)}
        everything = sorted(delay for row in delays.values() for delay in row)
        done = [delay for delay in everything if math.isfinite(delay)]
        self.simulation.distributions["seconds until a policy was whole"] = done
        sent = [site.endpoint.sent / self.policy_bytes / self.versions for site in self.workers]
        self.simulation.distributions["policies sent per version, by worker"] = sent
        rates = [8 * self.policy_bytes / MBIT / delay for delay in done]
        return {
            "versions": self.versions,
            "got_share": round(len(done) / max(1, len(everything)), 4),
            "seconds_mean": round(statistics.fmean(done), 1) if done else math.inf,
            **{f"seconds_{p}": round(_percentile(everything, p), 1) for p in (10, 50, 90, 99, 100)},
            "mbits_mean": round(statistics.fmean(rates), 1) if rates else 0.0,
            "mbits_at_mean_seconds": round(8 * self.policy_bytes / MBIT / statistics.fmean(done), 1) if done else 0.0,
            "own_line_seconds_50": round(self._own_line(alive), 1),
            "bound_seconds": round(self._bound(alive), 1),
            "origin_policies_sent": round(self.origin.endpoint.sent / self.policy_bytes / self.versions, 3),
            "relay_policies_sent": round(
                sum(site.endpoint.sent for site in self.relays) / self.policy_bytes / self.versions, 2
            ),
            "worker_policies_sent_50": round(statistics.median(sent), 3),
            "worker_policies_sent_max": round(max(sent), 3),
            "dead": len(self.workers) - len(alive),
        }

    def _delays(self, alive: Sequence[Site], version: int) -> list[float]:
        """Seconds until each worker had ``version`` or a newer one."""
        published = self.published_at(version)
        return [
            min((when for v, when in site.whole.items() if v >= version), default=math.inf) - published
            for site in alive
        ]

    def _own_line(self, alive: Sequence[Site]) -> float:
        """Seconds that a policy fills the median worker's own downlink: nobody can be faster."""
        return statistics.median(self.policy_bytes * site.endpoint.down_cost / SECOND for site in alive)

    def _bound(self, alive: Sequence[Site]) -> float:
        """Seconds until the last worker has a policy at best (Kumar and Ross, HotWeb 2006)."""
        helpers = [*alive, *self.relays]
        total = self.origin.endpoint.spec.up + sum(site.endpoint.spec.up for site in helpers)
        slowest = min(site.endpoint.spec.down for site in helpers)
        rate = min(self.origin.endpoint.spec.up, slowest, total / len(helpers))
        return 8 * self.policy_bytes / MBIT / rate

    def generation(self) -> dict[str, float | int | str]:
        """What the workers generated meanwhile, and what the trainer can do with it."""
        answer = self.scenario.parameter("answer_tokens", 6000.0)
        batch = self.scenario.parameter("batch_rollouts", 4096.0)
        limit = int(self.scenario.parameter("max_staleness", 2))
        end = self.versions * self.interval
        outputs = [generate(site, MODEL, answer, end) for site in self.workers]
        delivered = [(when, version, count) for output in outputs for when, version, count in output.delivered]
        staleness = [(self.version_at(when) - version, count) for when, version, count in delivered]
        rollouts = sum(count for _, count in staleness)
        stale = sum(count for lag, count in staleness if lag > limit)
        died = sum(output.died_with for output in outputs)
        tokens = answer * rollouts
        trainer = Machine(machine_named("H100").device, int(self.scenario.parameter("trainer_h100s", 16)))
        trained = batch * (answer + PROMPT_TOKENS) * self.versions
        useful = answer * (rollouts - stale)
        step = trainer.step_seconds(MODEL, trained / self.versions)
        return {
            "tokens_per_second": round(tokens / end),
            "utilisation": round(
                sum(output.busy for output in outputs) / sum(min(end, site.died) for site in self.workers), 4
            ),
            "staleness_mean": round(sum(lag * count for lag, count in staleness) / max(1, rollouts), 3),
            "staleness_max": max((lag for lag, _ in staleness), default=0),
            "rollouts": rollouts,
            "rollouts_lost_share": round((stale + died) / max(1, rollouts + died), 4),
            "rollouts_stale_share": round(stale / max(1, rollouts), 4),
            "seconds_to_a_batch": round(batch * end / max(1, rollouts - stale), 1),
            "training_seconds": round(step, 1),
            "trainer_utilisation": round(min(1.0, step / self.interval), 3),
            "inference_per_training_flops": round(2 * useful / (8 * trained), 2),
        }


@dataclass(frozen=True, slots=True)
class Output:
    """What one worker generated."""

    delivered: list[tuple[float, int, int]]
    """(virtual second, version, rollouts)."""
    busy: float
    """Seconds of decoding."""
    died_with: int
    """Rollouts that were under way when the machine died."""


def generate(site: Site, model: ModelSize, answer: float, end: float) -> Output:
    """Decode rollouts of ``answer`` tokens until ``end``, each round with the newest policy ready at its start."""
    assert site.machine is not None, "only workers generate"
    context = PROMPT_TOKENS + answer / 2
    together = site.machine.sequences(model, context)
    if not together:
        return Output([], 0.0, 0)
    round_seconds = together * answer / site.machine.generate_rate(model, context)
    delivered, busy, now, version = [], 0.0, 0.0, 0
    while now + round_seconds <= min(end, site.died):
        now += round_seconds
        busy += round_seconds
        delivered.append((now, version, together))
        newest = max((v for when, v in site.ready if when <= now), default=0)
        if newest > version:
            version = newest
            now += site.machine.load_seconds(model)
    return Output(delivered, busy, together if now < site.died <= end else 0)


def _percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1] if ordered else math.inf
