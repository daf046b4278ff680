"""The demo that learns from rewards: a model, its tasks, its recipe, and what is promised.

`SORTING` is the default of three minutes: 105,088 parameters that learn to sort digits.
`arithmetic` is the same swarm around a real chat model, a folder in Hugging Face's layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from p2p.identity import PeerId
from p2p.node.usage import remark
from p2p.wire import KI, MIB
from proofs.checks import Limits
from roles.contract import Run, Terms
from roles.contract.core.file import Delivery, EnvironmentPin, Model
from roles.contract.core.sampling import SamplingTerms
from roles.contract.core.trust import TrustTerms
from roles.demo.gate import ARITHMETIC_PROMISE, SORTING_PROMISE, LearningGate, Promise
from roles.engines.config import GIB
from roles.engines.evaluation import Evaluation
from roles.envs import sort
from roles.envs.arithmetic import EVALUATION_TASKS
from roles.envs.base import environment_digest
from roles.models.bundle import check_weights, pin_folder, read_config
from roles.models.ends import need_end_tokens
from roles.models.errors import NO_TEMPLATE, BadModel
from roles.own.layout import RunFolder, lay_base
from roles.own.nodes import LocalNodes
from roles.own.view import Learning, gain, plain, size
from roles.protocol.model_files import FOLDER
from roles.rl.learner import FILE as LEARNER, LearnerConfig, write_learner
from roles.rl.recipes import NETWORK, SMALL_MODEL, TRAINED

DEMO_TRUST: Final = TrustTerms(share=0.25, probation=8, window=4)
"""How workers earn it that not all of their work is checked: a demo is short, so a newcomer
owes little, and more is looked at to make up for it."""
KEEPS: Final = 0.1
"""How much held-out reward any other kind of task may lose before that is said."""

# Five engines share the machine: with a thread each they do twenty times as much as with
# torch's default.
_ONE_THREAD: Final = 'device = "cpu"\nthreads = 1\n'
_TORCH: Final = f'engine = "torch"\n{_ONE_THREAD}'
_MEMBERSHIP: Final = "[membership]\ninterval = 1.0\n"

SUMMARY: Final = """\
{peers} peers, {policies} policies, {seconds:.0f} s, {cpu_seconds:.0f} CPU s
  held-out reward   {gain}
  rollouts          {rollouts_accepted} accepted, {rollouts_rejected} rejected{staleness}
  the cheater       {cheater_submitted} submissions, {cheater_accepted} accepted; honest work \
rejected: {honest_rejected}
  its bans          {cheater_bans}{proof}"""
WEIGHTS: Final = """\
  weights           {size} a whole policy; for {policies} the trainer sent {sent},
                    five receivers got {leaf_share_from_peers:.0%} from each other"""
NO_WEIGHTS: Final = "  weights           no policy was published"


@dataclass(frozen=True, kw_only=True)
class RewardDemo(Learning):
    """A relay that only relays, a trainer, two honest inference nodes, one that cheats, and a
    validator learn from rewards."""

    cast: ClassVar[Mapping[str, str]] = {
        "relay-1": "none",
        "trainer-1": "trainer",
        "validator-1": "validator",
        "inference-1": "inference",
        "inference-2": "inference",
        "cheat-1": "roles.demo.cheats:Cheat",
    }

    environment: str
    """Where the tasks come from."""
    kinds: Mapping[str, float] = field(default_factory=dict)
    """Weights of the environment's kinds of tasks; empty: its own."""
    model: Model
    sampling: SamplingTerms
    learner: LearnerConfig
    limits: Limits
    promise: Promise
    held_out: int
    """Held-out tasks of the kind that the promise is about: by them chance is reckoned."""
    judged: str = ""
    """The kind of task that the promise is about; empty: all."""
    chunk_bytes: int = 0
    """Of SHARDCAST; 0 chooses by the policy's size."""
    base: Path | None = None
    """The model's folder, if it has one."""
    memory: int
    """Bytes that all processes together need."""
    disk: int
    """Bytes that the nodes' folders need."""

    @property
    def steps(self) -> int:
        return self.sampling.steps

    def with_steps(self, steps: int) -> Self:
        """Return the same demo of another length."""
        return replace(self, sampling=replace(self.sampling, steps=steps))

    def terms(self, seed: int, expiry: int, peers: Mapping[str, PeerId]) -> Terms:
        """Return what the run file says. ``seed`` is of the weights and of the warm-up."""
        pin = EnvironmentPin(
            name=self.environment,
            digest=environment_digest(self.environment),
            kinds=self.kinds,
        )
        return Terms(
            name=f"demo-{seed}",
            expiry=expiry,
            environments=(pin,),
            trainers=(peers["trainer-1"],),
            validators=(peers["validator-1"],),
            model=replace(self.model, seed=seed),
            sampling=self.sampling,
            limits=self.limits,
            delivery=Delivery(chunk_bytes=self.chunk_bytes),
            trust=DEMO_TRUST,
        )

    def furnish(self, folder: RunFolder, run: Run) -> None:
        """Write the nodes' configuration, and put the model where its trainer looks for it."""
        learner = write_learner(replace(self.learner, run=run.name))
        (folder.node("trainer-1") / LEARNER).write_text(learner)
        folder.config.write_text(
            f"[role.trainer]\n{_ONE_THREAD}checkpoint_every = {10 if self.base else 1}\n\n"
            f"[role.inference]\n{_TORCH}\n[role.validator]\n{_TORCH}\n{_MEMBERSHIP}"
        )
        # A node refuses the table of a role that it cannot find; the cheat alone finds its own.
        (folder.path / "cheat-1.toml").write_text(f"[role.cheat]\n{_TORCH}\n{_MEMBERSHIP}")
        if self.base is not None:
            lay_base(self.base, folder.node("trainer-1") / FOLDER, run)

    def figures(self, nodes: LocalNodes) -> dict[str, Any]:
        """Return what came of it."""
        status = nodes.status
        return {"steps": self.steps, **status.figures(), **status.answers()}

    def complaints(self, figures: Mapping[str, Any], *, promised: bool) -> Iterator[str]:
        """Yield what went otherwise than promised; a gain is ``promised`` for the default
        number of steps and more."""
        if promised:
            yield from self._gate(figures).failures()
        if promised and not figures["cheater_submitted"]:
            yield "the cheater handed in nothing, so that it was not shown that it is caught"
        if figures["cheater_accepted"]:
            yield f"{figures['cheater_accepted']} submissions of the cheater were accepted"
        if figures["cheater_submitted"] and not figures["cheater_bans"]:
            yield "the cheater was caught, and not banned"
        if figures["honest_rejected"]:
            yield f"{figures['honest_rejected']} submissions of honest nodes were rejected"

    def shortfalls(self, figures: Mapping[str, Any]) -> Iterator[str]:
        """Yield what was hoped for and did not come. It is no failure."""
        yield from self._gate(figures).shortfalls()
        first, last = figures["kinds_start"], figures["kinds_end"]
        for kind, (before, _) in first.items():
            if kind != self._judged_kind and last[kind][0] < before - KEEPS:
                after = last[kind][0]
                yield f"{kind} fell from {before:.3f} to {after:.3f}, by more than {KEEPS}"

    @property
    def _judged_kind(self) -> str:
        return self.judged and f"{self.environment}/{self.judged}"

    def _gate(self, figures: Mapping[str, Any]) -> LearningGate:
        """The first evaluation against the last, of the kind that the promise is about."""
        start, end = (
            Evaluation(*figures[f"kinds_{when}"][self._judged_kind])
            if self.judged
            else Evaluation(figures[f"greedy_{when}"], figures[f"reward_{when}"])
            for when in ("start", "end")
        )
        return LearningGate(start, end, self.promise, self.held_out)

    def summary(self, figures: dict[str, Any], *, promised: bool) -> Iterator[str]:
        """Yield what came of it, for people."""
        words = {
            **figures,
            "gain": gain(figures),
            "staleness": (
                f", staleness at most {figures['staleness_max']}"
                if figures["policies"] > 1
                else ""
            ),
            "proof": ", proven by the trainer's own replay" if figures["cheater_bans"] else "",
            "size": size(figures["policy_bytes"] or 0),
            "sent": size(figures["origin_upload_bytes"]),
        }
        yield from SUMMARY.format_map(words).splitlines()
        yield (WEIGHTS if figures["policy_bytes"] else NO_WEIGHTS).format_map(words)
        for line in self.shortfalls(figures) if promised else ():
            yield f"  not quite: {line}"
        yield from self.details(figures)

    def details(self, figures: Mapping[str, Any]) -> Iterator[str]:
        """Yield the rewards of each kind of task, where there are several, and what the policy
        answered to a few held-out questions, before and after."""
        first, last = figures["kinds_start"] or {}, figures["kinds_end"] or {}
        if len(first) > 1:
            yield "\n  held-out by kind    greedy          sampled"
            for kind, rewards in first.items():
                name, pairs = kind.rpartition("/")[2], zip(rewards, last[kind], strict=True)
                gains = "   ".join(f"{a:.3f} → {b:.3f}" for a, b in pairs)
                yield f"  {name:<18}  {gains}{'' if name in self.kinds else '   not trained'}"
        before, after = figures["shown_start"] or [], figures["shown_end"] or []
        asked = list(zip(before, after, strict=False))[: self.answers]
        if asked:
            yield "\n  held-out questions: before → after (✓ right)"
        for (prompt, *one), (_, *other) in asked:
            said = (
                f"{plain(self, tokens)} {'✓' if reward == 1 else '✗'}"
                for tokens, reward in (one, other)
            )
            yield f"  {plain(self, prompt)} {' → '.join(said)}"


# Calibrated on the demo's own policy: 4,000 honest groups have a mantissa mean of at most 0.047
# and one exponent mismatch; weights one step old at the lowest rate have a mean of 1.2 in the
# median group, and eight groups are judged at a time.
DEMO_LIMITS: Final = replace(Limits.fp32(), mantissa_mean=0.25, exponent_mismatches=3)

SORTING: Final = RewardDemo(
    environment="sort",
    model=Model(),
    sampling=NETWORK.sampling,
    learner=NETWORK.learner,
    limits=DEMO_LIMITS,
    promise=SORTING_PROMISE,
    held_out=sort.EVALUATION_TASKS,
    # So small that a policy of 420 kB, 13 chunks, has a forest to flow through.
    chunk_bytes=32 * KI,
    # Measured are 1.3 GB: six nodes of 42 MB, four engines of 172 MB, the trainer's of 304 MB,
    # this process; torch with CUDA takes more. A machine that swaps is slower than any
    # deadline.
    memory=2 * GIB,
    # Measured are 20 MB: each of six nodes keeps its newest policies of 0.4 MB, its ledger, its
    # log.
    disk=100 * MIB,
    opening="warming up: short lists, supervised …",
    decode=sort.decode,
)
"""Lists of digits."""


def arithmetic(folder: Path) -> RewardDemo:
    """Return the demo of a chat model that learns arithmetic. Raises `BadModel` if ``folder``
    holds none that can be used here."""
    from roles.models.tokenizer import Tokenizer

    config = read_config(folder)
    check_weights(folder, config)
    ends = need_end_tokens(folder, config)
    if not ends.has_template:
        raise BadModel(NO_TEMPLATE)
    for note in (*config.notes, *ends.notes):
        remark(f"{folder}: {note}")
    weights = config.shape.parameters
    return RewardDemo(
        environment="arithmetic",
        kinds=TRAINED["arithmetic"],
        model=Model(
            shape=config.shape,
            base=pin_folder(folder),
            context=config.context,
            end_tokens=ends.of_line,
        ),
        # After 24 steps of it addition, greedy, was at 0.69, 0.76 and, with seed 2, 0.60.
        sampling=SMALL_MODEL.sampling,
        learner=replace(SMALL_MODEL.learner, evaluate_every=15),
        limits=Limits.fp32(),
        promise=ARITHMETIC_PROMISE,
        held_out=EVALUATION_TASKS["addition"],
        judged="addition",
        base=folder,
        answers=10,
        # Weights in float32 in four engines; four times as much, and the activations, in the
        # trainer's; torch itself.
        memory=4 * weights * (4 + 5) + 4 * GIB,
        # Three policies in bfloat16 at five nodes, nine and two checkpoints of the trainer's.
        disk=2 * weights * (3 * 5 + 9) + 2 * 12 * weights,
        opening="the base is published and evaluated …",
        decode=Tokenizer.open(folder).decode,
    )
