"""The demo that learns from rewards: a model, its tasks, its recipe, and what is promised.

`SORTING` is the default of three minutes: 105,088 parameters that learn to sort digits.
`arithmetic` is the same swarm around a real chat model, a folder in Hugging Face's layout.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self

from p2p.wire import MIB
from roles.contract import Run
from roles.demo.gate import ARITHMETIC_PROMISE, SORTING_PROMISE, LearningGate, Promise
from roles.engines.config import GIB
from roles.engines.evaluation import Evaluation
from roles.envs import sort
from roles.envs.arithmetic import EVALUATION_TASKS
from roles.models.bundle import read_config
from roles.models.ends import need_end_tokens
from roles.models.fetch import base_folder
from roles.own.draft import Plan, write_draft
from roles.own.layout import TRAINER, VALIDATOR, RunFolder, lay_base
from roles.own.nodes import LocalNodes
from roles.own.trial import try_run
from roles.own.view import Learning, gain, plain, size
from roles.protocol.model_files import FOLDER
from roles.rl.learner import write_learner
from roles.rl.recipes import NETWORK, SMALL_MODEL, TRAINED, kind_of

DEMO_TRUST: Final = {"share": 0.25, "probation": 8, "window": 4}
"""How workers earn it that not all of their work is checked: a demo is short, so a newcomer
owes little, and more is looked at to make up for it."""
KEEPS: Final = 0.1
"""Most held-out reward that another kind of task may lose before the demo reports it."""

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
  its bans          {bans}"""
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
        TRAINER: "trainer",
        VALIDATOR: "validator",
        "inference-1": "inference",
        "inference-2": "inference",
        "cheat-1": "roles.demo.cheats:Cheat",
    }

    model: str = ""
    """Folder of a model, or the name of one that can be fetched; empty: a network that
    sorts.
    """
    steps: int
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Tables that differ from the draft of ``shoal run init``."""
    learner: Mapping[str, Any] = field(default_factory=dict)
    """Keys that differ from the ``learner.toml`` of ``shoal run init``."""
    promise: Promise
    held_out: int
    """Held-out tasks of the kind that the promise is about: by them chance is reckoned."""
    judged: str = ""
    """The kind of task that the promise is about; empty: all."""
    memory: int
    """Bytes that all processes together need."""
    disk: int
    """Bytes that the nodes' folders need."""

    def with_steps(self, steps: int) -> Self:
        """Return the same demo of another length."""
        return replace(self, steps=steps)

    def draft(self, seed: int, peers: Mapping[str, str]) -> dict[str, Any]:
        """Return the draft that ``shoal run init`` writes, for a short run. ``seed`` is of the
        weights and of the warm-up."""
        table = tomllib.loads(write_draft(Plan(f"demo-{seed}", self.model)))
        for name, changes in self.tables.items():
            table[name] |= changes
        table["model"]["seed"] = seed
        table["sampling"]["steps"] = self.steps
        officers = {"trainers": [peers[TRAINER]], "validators": [peers[VALIDATOR]]}
        return table | officers | {"trust": DEMO_TRUST}

    def furnish(self, folder: RunFolder, run: Run) -> None:
        """Write the nodes' configuration, and put the model where its trainer looks for it.

        Raises:
            ConfigError: Nodes could not work with that.
            BadModel: The model cannot be used.
        """
        kind = kind_of(run.terms.model.shape.parameters, has_base=bool(self.model))
        learner = replace(kind.learner, **{"run": run.name, **self.learner})
        folder.learner.write_text(write_learner(learner))
        folder.config.write_text(
            f"[role.trainer]\n{_ONE_THREAD}checkpoint_every = {10 if self.model else 1}\n\n"
            f"[role.inference]\n{_TORCH}\n[role.validator]\n{_TORCH}\n{_MEMBERSHIP}"
        )
        # A node refuses the table of a role that it cannot find; the cheat alone finds its own.
        (folder.path / "cheat-1.toml").write_text(f"[role.cheat]\n{_TORCH}\n{_MEMBERSHIP}")
        if self.model:
            lay_base(base_folder(self.model, "--model"), folder.node(TRAINER) / FOLDER, run)
            if not folder.document.exists():
                try_run(run, folder.node(TRAINER), "")

    def figures(self, nodes: LocalNodes) -> dict[str, Any]:
        """Return the figures of the result."""
        status = nodes.status
        return {"steps": self.steps, **status.figures(), **status.answers()}

    def complaints(self, figures: Mapping[str, Any], *, promised: bool) -> Iterator[str]:
        """Yield the broken promises. A gain is ``promised`` from the default number of steps
        on."""
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
        """Yield the hopes that were not met. They are no failures."""
        yield from self._gate(figures).shortfalls()
        first, last = figures["kinds_start"], figures["kinds_end"]
        for kind, (before, _) in first.items():
            if kind != self.judged and last[kind][0] < before - KEEPS:
                after = last[kind][0]
                yield f"{kind} fell from {before:.3f} to {after:.3f}, by more than {KEEPS}"

    def _gate(self, figures: Mapping[str, Any]) -> LearningGate:
        """Return the gate that compares the first and the last evaluation of the promise's
        kind.
        """
        start, end = (
            Evaluation(*figures[f"kinds_{when}"][self.judged])
            if self.judged
            else Evaluation(figures[f"greedy_{when}"], figures[f"reward_{when}"])
            for when in ("start", "end")
        )
        return LearningGate(start, end, self.promise, self.held_out)

    def summary(self, figures: dict[str, Any], *, promised: bool) -> Iterator[str]:
        """Yield the result in lines for people."""
        times = figures["cheater_bans"]
        words = {
            **figures,
            "gain": gain(figures),
            "staleness": (
                f", staleness at most {figures['staleness_max']}"
                if figures["policies"] > 1
                else ""
            ),
            "bans": f"{times}, proven by the trainer's own replay" if times else "none",
            "size": size(figures["policy_bytes"] or 0),
            "sent": size(figures["origin_upload_bytes"]),
        }
        yield from SUMMARY.format_map(words).splitlines()
        yield (WEIGHTS if figures["policy_bytes"] else NO_WEIGHTS).format_map(words)
        for line in self.shortfalls(figures) if promised else ():
            yield f"  not quite: {line}"
        yield from self.details(figures)

    def details(self, figures: Mapping[str, Any]) -> Iterator[str]:
        """Yield the rewards of each kind of task, if there are several, and the policy's
        answers to a few held-out questions, before and after."""
        first, last = figures["kinds_start"] or {}, figures["kinds_end"] or {}
        if len(first) > 1:
            yield "\n  held-out by kind    greedy          sampled"
            for kind, rewards in first.items():
                environment, _, name = kind.partition("/")
                pairs = zip(rewards, last[kind], strict=True)
                gains = "   ".join(f"{a:.3f} → {b:.3f}" for a, b in pairs)
                is_trained = name in TRAINED.get(environment, ())
                yield f"  {name:<18}  {gains}{'' if is_trained else '   not trained'}"
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


SORTING: Final = RewardDemo(
    steps=NETWORK.sampling.steps,
    # Calibrated on the demo's own policy: 4,000 honest groups have a mantissa mean of at most
    # 0.047 and one exponent mismatch; weights one step old at the lowest rate have a mean of
    # 1.2 in the median group, and eight groups are judged at a time.
    tables={"limits": {"mantissa_mean": 0.25, "exponent_mismatches": 3}},
    promise=SORTING_PROMISE,
    held_out=sort.EVALUATION_TASKS,
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
"""The demo that learns to sort lists of digits."""


def arithmetic(model: str) -> RewardDemo:
    """Return the demo of a chat model that learns arithmetic.

    Raises:
        BadModel: The folder holds no such model.
    """
    from roles.models.tokenizer import Tokenizer

    folder = base_folder(model, "--model")
    config = read_config(folder)
    need_end_tokens(folder, config)  # tries its tokenizer in a process of its own
    weights = config.shape.parameters
    return RewardDemo(
        model=model,
        # After 24 steps of it addition, greedy, was at 0.69, 0.76 and, with seed 2, 0.60.
        steps=SMALL_MODEL.sampling.steps,
        learner={"evaluate_every": 15},
        promise=ARITHMETIC_PROMISE,
        held_out=EVALUATION_TASKS["addition"],
        judged="arithmetic/addition",
        answers=10,
        # Weights in float32 in four engines; four times as much, and the activations, in the
        # trainer's; torch itself.
        memory=4 * weights * (4 + 5) + 4 * GIB,
        # Three policies in bfloat16 at five nodes, nine and two checkpoints of the trainer's.
        disk=2 * weights * (3 * 5 + 9) + 2 * 12 * weights,
        opening="the base is published and evaluated …",
        decode=Tokenizer.open(folder).decode,
    )
