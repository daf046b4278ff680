"""Participants of the scenario `volunteers`: machines, lines and run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from p2p.errors import ConfigError
from p2p.identity import PeerId
from p2p.node.config import NodeConfig
from p2p.shardcast.index import MAX_SPAN
from p2p.wire import KI
from proofs.checks import Limits
from roles.contract import Run, Terms, sign_run
from roles.contract.core.file import Delivery, EnvironmentPin
from roles.contract.core.sampling import SamplingTerms
from roles.envs.base import environment_digest, open_teaching
from roles.rl.recipes import SORTING
from sim.kernel.simulation import Simulation
from sim.net.link import LinkSpec, drawn_link
from sim.run.scenario import Scenario
from sim.studies.profiles import MODELS, TRAINING_BYTES, Machine, ModelSize, machine_named
from sim.workloads.dht import STAMP_BITS
from sim.workloads.spine import TRUST

ENVIRONMENT: Final = "sort"
SAMPLE: Final = 256
"""Tasks from which the mean length of a simulated answer is taken."""
CHUNK_BYTES: Final = 4 * KI
"""Bytes of a simulated chunk: the least that a run file allows."""
MANY_STEPS: Final = 1_000_000
"""A number of steps that no scenario has time for."""
HEADER: Final = 512
"""Bytes left in the last chunk for the header of the safetensors file."""
SHARE: Final = "share_"
"""Prefix of the parameters that say which share of the volunteers has which machine."""
PLAN_PARAMETERS: Final = (
    f"{SHARE}*",
    "sized_for",
    "group_size",
    "batch_rollouts",
    "policy_bytes",
    "model",
    "trainer",
    "validator",
    "validators",
    "relays",
    "answer_tokens",
    "prompt_tokens",
    "coarse",
    "submission",
    "max_staleness",
    "up_low",
    "up_high",
    "down_factor",
    "look_interval",
    "beat_interval",
    "gossip_interval",
)
"""The parameters that this module reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decoded parameters of a scenario."""

    model: ModelSize
    trainer: Machine
    validator: Machine
    validators: int
    relays: int
    """Number of servers that only relay."""
    mix: Mapping[Machine, float]
    """Share of the volunteers by machine."""
    answer: float
    """Tokens of a mean answer."""
    prompt: float
    """Tokens of a task's prompt."""
    policy_bytes: float
    """Bytes of a policy on the lines."""
    chunks: int
    """The number of chunks in which it travels."""
    sampling: SamplingTerms
    groups: int

    @property
    def rows(self) -> int:
        """Rollouts of a submission: what a worker generates in one go."""
        return self.sampling.submission * self.sampling.group_size

    @property
    def batch(self) -> int:
        """Rollouts of an optimiser step."""
        return self.groups * self.sampling.group_size

    @property
    def context(self) -> float:
        """Tokens of a sequence, on average over its decoding."""
        return self.prompt + self.answer / 2

    @property
    def step_tokens(self) -> float:
        """Tokens that an optimiser step trains on."""
        return self.batch * (self.prompt + self.answer)

    @property
    def simulated_bytes(self) -> int:
        """Bytes of the simulated policy's noise."""
        return self.chunks * CHUNK_BYTES - HEADER

    @property
    def scale(self) -> float:
        """Bytes that one byte of a simulated policy stands for."""
        return self.policy_bytes / (self.chunks * CHUNK_BYTES)

    @property
    def coarse(self) -> float:
        """Chunks of 4 MiB that one simulated chunk stands for."""
        return self.policy_bytes / self.chunks / MAX_SPAN

    @property
    def token_scale(self) -> float:
        """Tokens that one token of a right simulated answer stands for."""
        environment, rng = open_teaching(ENVIRONMENT), Random(0)
        tasks = [environment.task(rng.randbytes(32)) for _ in range(SAMPLE)]
        return self.answer / statistics.fmean(len(task.answer) for task in tasks)

    def role_table(self, machine: Machine, learning: float, skill: float) -> dict[str, Any]:
        """Return the tables ``[role.*]`` of a node with this machine."""
        speeds = machine.engine_table(
            self.model,
            context=self.context,
            step_tokens=self.step_tokens,
            rows=self.rows,
            scale=self.token_scale,
        )
        size = {
            "policy_bytes": self.simulated_bytes,
            "start_skill": skill,
            "learning": learning,
        }
        return {"profile": {**speeds, **size}}


def plan_of(scenario: Scenario) -> Plan:
    """Return the plan that the scenario's parameters describe.

    Batch, trainer, validators and relay servers are those of a run with ``sized_for``
    volunteers; with another number of them all four are in proportion.

    Raises:
        ConfigError: A machine cannot do its job.
    """
    mix = _mix(scenario)
    share = scenario.nodes / scenario.parameter("sized_for", scenario.nodes)
    size = int(scenario.parameter("group_size", 16))
    groups = max(1, round(share * scenario.parameter("batch_rollouts", 4096) / size))
    policy_bytes = scenario.parameter("policy_bytes", 62e9)
    plan = Plan(
        model=_model(scenario),
        trainer=_shrunk(_machine(scenario, "trainer", "16xH100"), _model(scenario), share),
        validator=_machine(scenario, "validator", "8xH100"),
        validators=max(1, round(share * scenario.parameter("validators", 2))),
        relays=max(1, round(share * scenario.parameter("relays", 10))),
        mix=mix,
        answer=scenario.parameter("answer_tokens", 6000),
        prompt=scenario.parameter("prompt_tokens", 500),
        policy_bytes=policy_bytes,
        chunks=max(2, math.ceil(policy_bytes / (MAX_SPAN * scenario.parameter("coarse", 128)))),
        sampling=SamplingTerms(
            steps=MANY_STEPS,
            group_size=size,
            submission=int(scenario.parameter("submission", 4)),
            lag=int(scenario.parameter("max_staleness", 2)),
            max_new_tokens=12,
        ),
        groups=groups,
    )
    try:
        plan.trainer.check_trains(plan.model)
        for machine in (*plan.mix, plan.validator):
            machine.check_generates(plan.model, plan.prompt + plan.answer)
    except ValueError as error:
        raise ConfigError(f"scenario {scenario.name}: {error}") from None
    return plan


def _shrunk(trainer: Machine, model: ModelSize, share: float) -> Machine:
    """Return a ``share`` of a trainer, but no less than the model needs if the whole trainer
    fits it.
    """
    fitting = math.ceil(trainer.count * TRAINING_BYTES * model.parameters / trainer.usable)
    count = max(1, round(share * trainer.count), min(fitting, trainer.count))
    return replace(trainer, count=count)


def _text(scenario: Scenario, key: str, default: str) -> str:
    value = scenario.parameters.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(
            f"scenario {scenario.name}: parameters.{key} must be a text, not {value!r}"
        )
    return value


def _model(scenario: Scenario) -> ModelSize:
    name = _text(scenario, "model", "32B")
    if name not in MODELS:
        raise ConfigError(
            f"scenario {scenario.name}: no model {name!r}; there are {', '.join(MODELS)}"
        )
    return MODELS[name]


def _machine(scenario: Scenario, key: str, default: str) -> Machine:
    return _named(scenario, _text(scenario, key, default))


def _named(scenario: Scenario, name: str) -> Machine:
    try:
        return machine_named(name)
    except ValueError as error:
        raise ConfigError(f"scenario {scenario.name}: {error}") from None


def _mix(scenario: Scenario) -> dict[Machine, float]:
    shares = {
        _named(scenario, key.removeprefix(SHARE)): scenario.parameter(key, 0.0)
        for key in scenario.parameters
        if key.startswith(SHARE)
    }
    shares = {machine: share for machine, share in shares.items() if share}
    if not shares or min(shares.values()) < 0 or not math.isclose(sum(shares.values()), 1):
        raise ConfigError(
            f"scenario {scenario.name}: the shares of machines must add up to 1, not {shares}"
        )
    return shares


def deal_machines(plan: Plan, count: int, rng: Random) -> list[Machine]:
    """Return a machine for each of ``count`` volunteers, in any order.

    The shares are as exact as whole numbers allow.
    """
    dealt: list[Machine] = []
    total = 0.0
    for machine, share in plan.mix.items():
        total += share
        dealt += [machine] * (round(total * count) - len(dealt))
    rng.shuffle(dealt)
    return dealt


def draw_line(scenario: Scenario, rng: Random) -> LinkSpec:
    """Return a random line for one more volunteer, drawn between ``up_low`` and ``up_high``."""
    uplinks = scenario.parameter("up_low", 200), scenario.parameter("up_high", 2000)
    return drawn_link(rng, uplinks, scenario.parameter("down_factor", 2))


def write_run(simulation: Simulation, plan: Plan, trainer: str, validators: list[str]) -> Run:
    """Return the run, signed by an owner who takes no part."""

    def peer(name: str) -> PeerId:
        return simulation.keys.signer(name).peer_id

    terms = Terms(
        name="volunteers",
        expiry=2**32 - 1,
        environments=(
            EnvironmentPin(name=ENVIRONMENT, digest=environment_digest(ENVIRONMENT)),
        ),
        trainers=(peer(trainer),),
        validators=tuple(peer(name) for name in validators),
        model=replace(SORTING, engine="fake"),
        sampling=plan.sampling,
        limits=replace(Limits.fp32(), end_probability=1e-12),
        delivery=Delivery(chunk_bytes=CHUNK_BYTES),
        trust=TRUST,  # hours of probation would hide what is measured here
    )
    return sign_run(terms, simulation.keys.signer("owner"))


def node_config(scenario: Scenario, plan: Plan) -> NodeConfig:
    """Return production's settings, except for slower heartbeats and more patience with coarse
    chunks."""
    config = NodeConfig()
    look = scenario.parameter("look_interval", 1800.0)
    return replace(
        config,
        run=replace(config.run, refresh=look),
        dht=replace(
            config.dht, difficulty=STAMP_BITS, refresh_interval=look, republish_interval=look
        ),
        membership=replace(
            config.membership, interval=scenario.parameter("beat_interval", 60.0)
        ),
        gossip=replace(config.gossip, interval=scenario.parameter("gossip_interval", 20.0)),
        shardcast=replace(config.shardcast, stall=config.shardcast.stall * plan.coarse),
    )
