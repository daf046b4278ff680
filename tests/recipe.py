"""Every number of a recipe, in docs/recipe.md: ``python -m tests.recipe --write``.

Meanings and defaults come from the dataclasses; others' names are here. A test fails
where the page is not what the code says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Final

from roles.rl.algorithms.find import find_algorithm
from roles.rl.recipes import KINDS, NETWORK
from tests import run_file

PAGE: Final = Path(__file__).parent.parent / "docs" / "recipe.md"
HEAD: Final = """# Recipe

Every number by which a run learns. `shoal run init` writes those that work for a model of its
size. `python -m tests.recipe --write` makes this page from the code.

- **Network**: {network}.
- **Small**: {small}.
- **Large**: {large}.

TRL: fields of `GRPOConfig`, with * of `AsyncGRPOConfig`. prime-rl: keys of its orchestrator
(`o.`) and trainer (`t.`).
"""
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
OTHERS: Final = {"TRL": TRL, "prime-rl": PRIME}


def table(
    file: str,
    name: str,
    examples: Mapping[str, object] | None = None,
    *,
    others: Mapping[str, Mapping[str, str]] = {},
) -> Iterator[str]:
    """Rows of a dataclass: with ``examples`` a default for each size of model."""
    heads = list(examples) if examples else ["default"]
    heads += others
    yield f"\n| key | meaning | {' | '.join(heads)} |"
    yield "|" + "---|" * (2 + len(heads))
    for key, default, text in run_file.fields(file, name):
        if key in ("options", "warm_up"):  # tables of their own
            continue
        values = [shown(getattr(one, key)) for one in (examples or {}).values()] or [default]
        cells = [f"`{key}`", text.replace("|", "\\|"), *values]
        cells += [names.get(key, "") for names in others.values()]
        yield f"| {' | '.join(cells)} |"


def shown(value: object) -> str:
    """A number of a recipe as TOML has it."""
    match value:
        case Enum():
            return str(value.value)
        case tuple():
            return ", ".join(map(shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def place_of(options: object) -> tuple[str, str]:
    """File and name of a dataclass."""
    kind = type(options)
    return f"{kind.__module__.replace('.', '/')}.py", kind.__name__


def page() -> str:
    """The whole page."""
    kinds = dict(zip(("network", "small", "large"), KINDS, strict=True))
    about = {name: f"{kind.name}; {kind.source}" for name, kind in kinds.items()}
    lines = [HEAD.format(**about), "## `[sampling]` of draft.toml: what nodes agree on"]
    sampling = {name: kind.sampling for name, kind in kinds.items()}
    lines += table("roles/contract/core/sampling.py", "SamplingTerms", sampling, others=OTHERS)
    lines += ["\n## learner.toml: the trainer's alone"]
    learner = {name: kind.learner for name, kind in kinds.items()}
    lines += table("roles/rl/learner.py", "LearnerConfig", learner, others=OTHERS)
    lines += ["\n## `[warm_up]` of learner.toml: before the first policy of a network"]
    warm_up = {"network": NETWORK.learner.warm_up}
    lines += table("roles/rl/learner.py", "WarmUp", warm_up)
    lines += ["\n## `[options]` of learner.toml", "\nOf every algorithm:"]
    lines += table(*place_of(find_algorithm("grpo", {}).shared), others={"TRL": TRL})
    for name in ("grpo", "dapo", "dr_grpo", "cispo", "gspo"):
        lines += [
            f"\nOf `{name}`:",
            *table(*place_of(find_algorithm(name, {}).algorithm), others={"TRL": TRL}),
        ]
    lines += ["\n## `[diloco]` of draft.toml: pre-training"]
    lines += table("roles/contract/core/diloco.py", "DilocoTerms")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
