"""Every number of a recipe, in docs/recipe.md: ``python -m tests.recipe --write``.

Meanings and defaults come from the dataclasses; units and others' names are here. A test fails
where the page is not what the code says.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Final

from roles.contract.core.diloco import DilocoTerms
from roles.contract.core.sampling import SamplingTerms
from roles.rl.algorithms.find import find_algorithm
from roles.rl.learner import LearnerConfig, WarmUp
from roles.rl.recipes import KINDS, NETWORK

PAGE: Final = Path(__file__).parent.parent / "docs" / "recipe.md"
HEAD: Final = """# Recipe

Every number by which a run learns. `shoal run init` writes those that work for a model of its
size; what is left out of a file has its default. `python -m tests.recipe --write` makes this
page from the code.

- **Network**: {network}.
- **Small**: {small}.
- **Large**: {large}.

TRL: fields of `GRPOConfig`, with * of `AsyncGRPOConfig`. prime-rl: keys of its orchestrator
(`o.`) and trainer (`t.`). An empty cell: it has no such number.
"""
UNITS: Final = {
    "steps": "steps", "group_size": "answers", "max_new_tokens": "tokens",
    "submission": "groups",
    "lag": "steps", "proof_values": "values", "rate": "a step", "groups": "groups",
    "minibatches": "updates", "ramp": "steps", "floor": "share", "decay_share": "share",
    "evaluate_every": "steps", "evaluate_tasks": "tasks", "outer_steps": "rounds",
    "inner_steps": "steps", "round_seconds": "seconds", "sequences": "sequences",
    "window": "tokens", "warmup": "steps", "grace": "seconds", "patience": "seconds",
    "beat": "seconds", "batch": "tasks", "outer_rate": "a round",
}  # fmt: skip
TRL: Final = {
    "steps": "max_steps", "group_size": "num_generations", "temperature": "temperature",
    "max_new_tokens": "max_completion_length", "lag": "max_staleness*",
    "algorithm": "loss_type", "rate": "learning_rate", "minibatches": "steps_per_generation",
    "groups": "generation_batch_size (answers)",
    "schedule": "lr_scheduler_type", "ramp": "warmup_steps",
    "betas": "adam_beta1, adam_beta2", "weight_decay": "weight_decay",
    "gradient_norm": "max_grad_norm", "evaluate_every": "eval_steps", "sinks": "report_to",
    "clip": "epsilon", "clip_negative": "delta", "cap": "epsilon_high",
    "clip_low": "epsilon", "clip_high": "epsilon_high", "kl_reference": "beta",
    "importance_cap": "vllm_importance_sampling_cap",
}  # fmt: skip
PRIME: Final = {
    "steps": "o.max_steps", "group_size": "o.rollouts_per_example",
    "max_new_tokens": "o.sampling.max_tokens", "temperature": "o.sampling.temperature",
    "lag": "o.max_off_policy_steps", "groups": "o.batch_size (answers)", "rate": "t.optim.lr",
    "schedule": "t.scheduler.type", "ramp": "t.scheduler.warmup_steps",
    "floor": "t.scheduler.min_lr (a rate)", "decay_share": "t.scheduler.decay_steps (steps)",
    "weight_decay": "t.optim.weight_decay", "gradient_norm": "t.optim.max_norm",
    "evaluate_every": "o.eval.interval", "evaluate_tasks": "o.eval.num_examples",
}  # fmt: skip


def meanings(kind: type) -> dict[str, str]:
    """The first sentence or two behind each field of a dataclass."""
    found, body = {}, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    for one, text in zip(body.body, body.body[1:], strict=False):
        match one, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(said))):
                found[name] = re.sub(r"\s+", " ", said.replace("``", "`")).replace("|", "\\|")
    return found


def shown(value: object) -> str:
    """A default as TOML has it."""
    match value:
        case None:
            return ""
        case Enum():
            return str(value.value)
        case float():
            return f"{value:g}"
        case tuple():
            return ", ".join(map(shown, value))
        case Mapping():
            return ", ".join(f"{key} {shown(one)}" for key, one in value.items())
    return str(value)


def default(field: Field[Any]) -> object:
    """What stands if nothing does."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def table(
    kind: type, examples: Mapping[str, object] | None = None, *, has_others: bool = True
) -> Iterator[str]:
    """Rows of a dataclass: with ``examples`` a default for each size of model."""
    heads = list(examples) if examples else ["default"]
    heads += ["TRL", "prime-rl"] if has_others else []
    yield f"\n| key | meaning | unit | {' | '.join(heads)} |"
    yield "|" + "---|" * (3 + len(heads))
    said = meanings(kind)
    for field in fields(kind):
        name = field.name
        if name in ("options", "warm_up"):  # tables of their own
            continue
        values = [getattr(one, name) for one in (examples or {}).values()] or [default(field)]
        cells = [f"`{name}`", said.get(name, ""), UNITS.get(name, ""), *map(shown, values)]
        cells += [TRL.get(name, ""), PRIME.get(name, "")] if has_others else []
        yield f"| {' | '.join(cells)} |"


def page() -> str:
    """The whole page."""
    kinds = dict(zip(("network", "small", "large"), KINDS, strict=True))
    about = {name: f"{kind.name}; {kind.source}" for name, kind in kinds.items()}
    lines = [HEAD.format(**about), "## `[sampling]` of draft.toml: what nodes agree on"]
    lines += table(SamplingTerms, {name: kind.sampling for name, kind in kinds.items()})
    lines += ["\n## learner.toml: the trainer's alone"]
    lines += table(LearnerConfig, {name: kind.learner for name, kind in kinds.items()})
    lines += ["\n## `[warm_up]` of learner.toml: before the first policy of a network"]
    assert NETWORK.learner.warm_up is not None
    lines += table(WarmUp, {"network": NETWORK.learner.warm_up}, has_others=False)
    lines += ["\n## `[options]` of learner.toml"]
    lines += ["\nOf every algorithm:", *table(type(find_algorithm("grpo", {}).shared))]
    for name in ("grpo", "dapo", "dr_grpo", "cispo", "gspo"):
        kind = type(find_algorithm(name, {}).algorithm)
        lines += [f"\nOf `{name}`:", *table(kind)] if fields(kind) else []
    lines += [
        "\n## `[diloco]` of draft.toml: pre-training",
        *table(DilocoTerms, has_others=False),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
