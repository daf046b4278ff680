"""A 32 B run on volunteers' machines: real roles, speeds from device profiles. (L1)

One trainer's site, validators, a few servers that only relay, and many volunteers whose
machines and lines are drawn from the scenario's distributions and who come and go. Every node
is `p2p.node.open_node` with its production role: membership, gossip, DHT, SHARDCAST, run file,
ledger, outbox, pool. The fake engine computes; how long everything takes comes from
`sim.studies.profiles`, and what a policy or a submission weighs on the lines from
`sim.studies.volunteers.freight`. The rules:

- A token of a simulated answer stands for 856: engines and lines are charged for answers of
  6,000.
- A chunk of 4 KiB stands for ``coarse`` chunks of 4 MiB, as in
  `sim.studies.intellect2.shardcast`. Patience grows with the chunk; what SHARDCAST computes
  over a policy takes as long as for the full size.
- Heartbeats and gossip are slowed down (parameters), or hours of 200 nodes would cost hours.

``nodes`` counts volunteers; batch, trainer, validators and relay servers are in proportion. All
but the volunteers stay; these die by a churn model and come back on their disk. Figures about
use of time count from ``settle`` seconds on, when most have the first policy; figures about
rollouts count from the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, cast

import trio

from p2p.identity import ProtocolId
from p2p.node.node import Node, open_node, run_roles
from p2p.node.plugins import load_roles
from p2p.node.role import Role
from p2p.shardcast.manifest import PolicyVersion
from p2p.shardcast.messages import BULK_PROTOCOL_ID, CHUNK_KIND
from p2p.wire import decode_varint_untrusted
from p2p.world import World
from roles.contract import Run, open_run
from roles.protocol.core.answer import WORK_PROTOCOL
from roles.rl.learner import FILE, LearnerConfig, write_learner
from sim.faults.churn import HOUR, Churn, ChurnModel, Lognormal
from sim.net.link import MBIT, LinkSpec
from sim.node.swarm import NodeMain, SimNode, Swarm
from sim.run.scenario import Scenario
from sim.studies.profiles import Machine
from sim.studies.volunteers.figures import VALIDATOR, VOLUNTEER, Journal, figures, plot
from sim.studies.volunteers.freight import Freight, Weigh
from sim.studies.volunteers.plan import (
    PLAN_PARAMETERS,
    Plan,
    deal_machines,
    draw_line,
    node_config,
    plan_of,
    write_run,
)
from sim.studies.volunteers.timesheet import TimedWorld, Timesheet

TRAINER: Final = "trainer"
CLAIM: Final = 0.9
"""Share of its uplink that a node says it has: a line filled to the brim starves its own
acks."""


class Volunteers:
    """A trainer's site, validators, relay servers, and volunteers who come and go."""

    parameters: ClassVar[Sequence[str]] = (
        *PLAN_PARAMETERS,
        "site_mbit",
        "lifetime",
        "lifetime_sigma",
        "downtime",
        "downtime_sigma",
        "silent",
        "arrival",
        "learning",
        "skill",
        "patience",
        "price_*",
    )

    def __init__(self) -> None:
        self._scenario: Scenario
        self._plan: Plan
        self._run: Run
        self._freight: Freight
        self._journal: Journal
        self._bootstrap: SimNode

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Let the run go on for ``scenario.duration``. Return the use of all machines' time and
        work."""
        self._scenario, self._plan = scenario, plan_of(scenario)
        plan = self._plan
        validators = [f"{VALIDATOR}{n}" for n in range(plan.validators)]
        self._run = write_run(swarm.simulation, plan, TRAINER, validators)
        self._freight = Freight(swarm, self._scales())
        self._journal = Journal(plan, lambda: swarm.simulation.now)
        self._config = node_config(scenario, plan)
        learner = LearnerConfig(groups=plan.groups, rate=8e-4, evaluate_every=1)
        self._learner = write_learner(learner).encode()
        swarm.on_death.append(lambda node: self._journal.note_death(node.name))
        site = scenario.parameter("site_mbit", 10_000)
        for number in range(plan.relays):
            self._add(swarm, f"relay{number}", "none", None, LinkSpec(up=site, down=site))
        self._add(swarm, TRAINER, "trainer", plan.trainer, LinkSpec(up=site, down=site))
        for name in validators:
            self._add(swarm, name, "validator", plan.validator, LinkSpec(up=site, down=site))
        await self._invite(swarm)
        await swarm.sleep_until(scenario.duration / 5)
        self._journal.restart_sheets()
        await swarm.sleep_until(scenario.duration)
        return figures(self._journal, swarm, scenario)

    async def _invite(self, swarm: Swarm) -> None:
        """Let the volunteers come, one after the other, and go when their time is over."""
        scenario = self._scenario
        number = scenario.parameter
        up = Lognormal(number("lifetime", 4 * HOUR), number("lifetime_sigma", 1.46))
        down = Lognormal(number("downtime", 2412), number("downtime_sigma", 1.28))
        churn = Churn(swarm, ChurnModel(up=up, down=down, silent=number("silent", 0.5)))
        machines = deal_machines(self._plan, scenario.nodes, swarm.rng("machines"))
        lines = swarm.rng("lines")
        swarm.every(scenario.duration / 200, lambda: plot(self._journal, swarm))
        pause = number("arrival", 300) / scenario.nodes
        for place, machine in enumerate(machines):
            name = f"{VOLUNTEER}{place}"
            self._add(swarm, name, "inference", machine, draw_line(scenario, lines))
            churn.add(name)
            await swarm.sleep(pause)

    def _scales(self) -> dict[ProtocolId, Weigh]:
        """Return the scale of each protocol's frames: chunks stand for larger ones, rollouts
        for longer ones."""
        policies, rollouts = self._plan.scale, self._plan.token_scale

        def weigh_bulk(frame: bytes) -> float:
            start = decode_varint_untrusted(frame)
            is_chunk = start is not None and frame[start[1]] == CHUNK_KIND
            return len(frame) * (policies if is_chunk else 1)

        def weigh_rollouts(frame: bytes) -> float:
            start = decode_varint_untrusted(frame)
            # requests and replies are a list that begins with a word, content is one of lists
            is_content = start is not None and frame[start[1] + 1] & 0xE0 != 0xA0
            return len(frame) * (rollouts if is_content else 1)

        return {
            BULK_PROTOCOL_ID: weigh_bulk,
            WORK_PROTOCOL: weigh_rollouts,
        }

    def _add(
        self, swarm: Swarm, name: str, role: str, machine: Machine | None, link: LinkSpec
    ) -> None:
        self._journal.sheets[name] = Timesheet(lambda: swarm.simulation.now)
        if machine is not None:
            self._journal.machines[name] = machine
        node = swarm.add(name, self._life(role, machine), link=link)
        if not self._journal.lines:
            self._bootstrap = node
        self._journal.lines[name] = self._freight.line(node)

    def _life(self, role: str, machine: Machine | None) -> NodeMain:
        """Run one life of a node."""

        async def live(node: SimNode) -> None:
            roles = load_roles((role,), self._tables(role, machine))
            self._journal.note_birth(node.name, roles)
            world = self._timed(node)
            first = node is self._bootstrap
            await world.disk.write(FILE, self._learner)
            async with (
                self._freight.open_host(node) as host,
                open_node(
                    world,
                    host,
                    self._config,
                    document=self._run.document if first else None,
                    bootstrap=() if first else (self._bootstrap.addr,),
                    reader=open_run,
                ) as opened,
            ):
                await self._work(node, opened, roles)

        return live

    def _tables(self, role: str, machine: Machine | None) -> dict[str, dict[str, Any]]:
        if machine is None:
            return {}
        learning, skill = (
            self._scenario.parameter("learning", 0.02),
            self._scenario.parameter("skill", 0.35),
        )
        table = dict(self._config.role.get(role, {}))
        return {role: {**table, **self._plan.role_table(machine, learning, skill)}}

    def _timed(self, node: SimNode) -> World:
        note = partial(self._journal.note, node.name)
        return cast(
            World,
            TimedWorld(node.world, self._journal.sheets[node.name], self._plan.scale, note),
        )

    async def _work(self, node: SimNode, opened: Node, roles: list[Role]) -> None:
        self._journal.policies[node.name] = opened.shardcast
        opened.membership.me.update(upload=int(CLAIM * node.endpoint.spec.up * MBIT / 8))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_policies, node.name, opened)
            await run_roles(opened, roles)

    async def _watch_policies(self, name: str, opened: Node) -> None:
        newest = opened.shardcast.newest
        while True:
            newest = await opened.shardcast.wait_policy(PolicyVersion(newest + 1))
            self._journal.note_arrival(name, newest)
