"""A trainer's site and many volunteers: their lines, their machines, and their policies.

Both `sim.studies.intellect2.shardcast` workloads play on these sites with the same draws, so
that a seed gives the same lines, machines and deaths to both ways of distribution. Everything
is stated in the scenario; nothing is fitted.

One policy is distributed, and the next ones are taken to cost each worker the same time; a
worker that needs longer than the ``interval`` between two takes every second or third.
Generation is computed from that: a worker decodes as many rollouts at a time as its memory
holds, finishes them before it changes the policy (no sequence mixes two), loads the newest that
is ready, and goes on. A rollout counts if it is delivered at most ``max_staleness`` versions
behind the newest publication; what is older, or dies with its machine, is lost. Delivery itself
(some bytes a token) is free.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from p2p.identity import PeerId
from sim.kernel.queue import SECOND, Owner
from sim.kernel.simulation import Simulation
from sim.net.fabric import Endpoint, Fabric
from sim.net.link import MBIT, LinkSpec, drawn_link
from sim.run.scenario import Scenario
from sim.studies.profiles import (
    DEVICES,
    MODELS,
    PREFILL_FLOPS,
    TRAINING_FLOPS,
    Machine,
    machine_named,
)
from sim.workloads.policies import percentile

MODEL = MODELS["32B"]
FILE_BYTES = 62e9
"""Bytes of one policy as published (INTELLECT-2, arXiv 2505.07291)."""
PERCENTILES = (10, 50, 90, 99, 100)
"""Shares of the receivers whose times a report names: half, most, and the last."""
PROMPT_TOKENS = 500
"""Estimate: a mathematics or coding task with its instructions."""
SITE_PARAMETERS = (
    "interval",
    "versions",
    "policy_bytes",
    "origin_up",
    "relay_up",
    "relays",
    "up_low",
    "up_high",
    "down_factor",
    "share_8xH100",
    "share_4x4090",
    "deaths",
    "answer_tokens",
    "batch_rollouts",
    "max_staleness",
    "trainer_h100s",
)
"""The parameters that `Sites` reads."""


@dataclass(slots=True, eq=False)
class Site:
    """A machine of the run: its line, and its part of the policy."""

    name: str
    peer: PeerId
    owner: Owner
    endpoint: Endpoint
    machine: Machine | None = None
    """The worker's hardware; None for the trainer's site and for relay servers."""
    died: float = math.inf
    whole: float = math.inf
    """Virtual second at which all bytes of the policy were here."""
    ready: float = math.inf
    """Virtual second at which it could be loaded: checked and put together."""

    @property
    def alive(self) -> bool:
        """True if it runs now."""
        return self.owner.alive


class Sites:
    """The sites of one scenario, and the schedule of publications."""

    def __init__(self, simulation: Simulation, scenario: Scenario) -> None:
        self.simulation = simulation
        self.scenario = scenario
        self.queue = simulation.queue
        self.fabric = Fabric(simulation, lambda one, other: scenario.latency)
        self.interval = scenario.parameter("interval", 1320.0)
        self.versions = int(scenario.parameter("versions", 4))
        self.policy_bytes = scenario.parameter("policy_bytes", FILE_BYTES)
        trainer, server = (
            scenario.parameter("origin_up", 10_000.0),
            scenario.parameter("relay_up", 10_000.0),
        )
        self.origin = self._add("origin", LinkSpec(up=trainer, down=trainer))
        line = LinkSpec(up=server, down=server)
        self.relays = [
            self._add(f"relay{n}", line) for n in range(int(scenario.parameter("relays", 10)))
        ]
        self.workers = [self._draw_worker(n) for n in range(scenario.nodes)]
        self._schedule_deaths()

    @property
    def all_sites(self) -> list[Site]:
        """The origin, the relay servers and the workers."""
        return [self.origin, *self.relays, *self.workers]

    @property
    def now(self) -> float:
        """Virtual seconds since the first publication."""
        return self.queue.now / SECOND

    def version_at(self, when: float) -> int:
        """Return the newest version published at ``when``. The first one is published at 0."""
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
        site.machine = machine_named(
            "8xH100" if dice < large else "4x4090" if dice < middle else "4x3090"
        )
        return site

    def _schedule_deaths(self) -> None:
        rng = self.simulation.rng("swarm", "deaths")
        count = round(self.scenario.parameter("deaths", 0.02) * len(self.workers))
        for site in rng.sample(self.workers, count):
            site.died = rng.uniform(0, self.interval)

    def arrived(self, site: Site, ready_after: float) -> None:
        """Note that all bytes are at `site`, which can load the policy ``ready_after`` seconds
        later."""
        site.whole = self.now
        site.ready = self.now + ready_after

    # What came of it

    def distribution(self) -> dict[str, float | int | str]:
        """Metrics of a policy's distribution: times, and lines used. Dead workers are not
        waited for."""
        alive = [site for site in self.workers if site.alive]
        delays = sorted(site.whole for site in alive)
        done = [delay for delay in delays if math.isfinite(delay)]
        sent = [site.endpoint.sent / self.policy_bytes for site in self.workers]
        self.simulation.distributions["seconds until the policy was whole"] = done
        self.simulation.distributions["policies sent, by worker"] = sent
        mean = statistics.fmean(done) if done else math.inf
        return {
            "got_share": round(len(done) / max(1, len(delays)), 4),
            "seconds_mean": round(mean, 1),
            **{
                f"seconds_{percent}": round(percentile(delays, percent), 1)
                for percent in PERCENTILES
            },
            "mbits_at_mean": round(8 * self.policy_bytes / MBIT / mean, 1),
            "own_line_seconds_50": round(self._own_line(alive), 1),
            "bound_seconds": round(self._bound(alive), 1),
            "times_bound_99": round(percentile(delays, 99) / self._bound(alive), 3),
            "origin_policies_sent": round(self.origin.endpoint.sent / self.policy_bytes, 3),
            "relays_policies_sent": round(self._sent(self.relays), 2),
            "worker_policies_sent_50": round(statistics.median(sent), 3),
            "worker_policies_sent_100": round(max(sent), 3),
            "dead": len(self.workers) - len(alive),
        }

    def _sent(self, all_sites: Sequence[Site]) -> float:
        return sum(site.endpoint.sent for site in all_sites) / self.policy_bytes

    def _own_line(self, alive: Sequence[Site]) -> float:
        """Seconds that a policy fills the median worker's own downlink: no design can be
        faster."""
        return statistics.median(
            self.policy_bytes * site.endpoint.down_cost / SECOND for site in alive
        )

    def _bound(self, alive: Sequence[Site]) -> float:
        """Seconds until the last worker has a policy at best (Kumar and Ross, HotWeb 2006)."""
        helpers = [*alive, *self.relays]
        total = self.origin.endpoint.spec.up + sum(site.endpoint.spec.up for site in helpers)
        slowest = min(site.endpoint.spec.down for site in helpers)
        rate = min(self.origin.endpoint.spec.up, slowest, total / len(helpers))
        return 8 * self.policy_bytes / MBIT / rate

    def generation(self) -> dict[str, float | int | str]:
        """Metrics of generation meanwhile, and its use for the trainer."""
        answer = self.scenario.parameter("answer_tokens", 6000.0)
        batch = self.scenario.parameter("batch_rollouts", 4096.0)
        limit = int(self.scenario.parameter("max_staleness", 2))
        end = self.versions * self.interval
        outputs = [self._generate(site, answer, end) for site in self.workers]
        delivered = [
            (when, version, count)
            for output in outputs
            for when, version, count in output.delivered
        ]
        staleness = [
            (self.version_at(when) - version, count) for when, version, count in delivered
        ]
        rollouts = sum(count for _, count in staleness)
        stale = sum(count for lag, count in staleness if lag > limit)
        died = sum(output.died_with for output in outputs)
        tokens = answer * rollouts
        trainer = Machine(DEVICES["H100"], int(self.scenario.parameter("trainer_h100s", 16)))
        trained = batch * (answer + PROMPT_TOKENS) * self.versions
        useful = answer * (rollouts - stale)
        step = trainer.step_seconds(MODEL, trained / self.versions)
        return {
            "tokens_per_second": round(tokens / end),
            "utilisation": round(
                sum(output.busy for output in outputs)
                / sum(min(end, site.died) for site in self.workers),
                4,
            ),
            "staleness_mean": round(
                sum(lag * count for lag, count in staleness) / max(1, rollouts), 3
            ),
            "staleness_max": max((lag for lag, _ in staleness), default=0),
            "rollouts": rollouts,
            "rollouts_lost_share": round((stale + died) / max(1, rollouts + died), 4),
            "rollouts_stale_share": round(stale / max(1, rollouts), 4),
            "seconds_to_a_batch": round(batch * end / max(1, rollouts - stale), 1),
            "training_seconds": round(step, 1),
            "trainer_utilisation": round(min(1.0, step / self.interval), 3),
            "inference_per_training_flops": round(
                PREFILL_FLOPS * useful / ((TRAINING_FLOPS + PREFILL_FLOPS) * trained), 2
            ),
        }

    def _generate(self, site: Site, answer: float, end: float) -> Output:
        step = (
            max(1, math.ceil(site.ready / self.interval))
            if site.ready < math.inf
            else self.versions + 1
        )
        ready = [
            ((version - 1) * self.interval + site.ready, version)
            for version in range(1, self.versions + 1, step)
        ]
        assert site.machine is not None, "only workers generate"
        return generate(site.machine, ready, answer, end, site.died)


@dataclass(frozen=True, slots=True)
class Output:
    """Rollouts of one worker, and their fates."""

    delivered: list[tuple[float, int, int]]
    """Each delivery as (virtual second, version, rollouts)."""
    busy: float
    """Seconds spent decoding."""
    died_with: int
    """Rollouts that were under way when the machine died."""


def generate(
    machine: Machine, ready: Sequence[tuple[float, int]], answer: float, end: float, died: float
) -> Output:
    """Decode rollouts of ``answer`` tokens until ``end``, each round with the newest version
    ready by then.

    ``ready`` is (virtual second, version) in order; version 0 was there before.
    """
    context = PROMPT_TOKENS + answer / 2
    together = machine.sequences(MODEL, context)
    if not together:
        return Output([], 0.0, 0)
    seconds = together * answer / machine.generate_rate(MODEL, context)
    delivered, busy, now, version = [], 0.0, 0.0, 0
    while now + seconds <= min(end, died):
        now += seconds
        busy += seconds
        delivered.append((now, version, together))
        newest = max((v for when, v in ready if when <= now), default=0)
        if newest > version:
            version = newest
            now += machine.load_seconds(MODEL)
    return Output(delivered, busy, together if now < died <= end else 0)
