"""Each algorithm's loss is what TRL 1.16 computes: ``pip install trl==1.16.0``.

The loss is `GRPOTrainer._compute_loss` itself. It is called on a trainer that was given its
settings and this test's log-probs, and no model.
"""

from collections import defaultdict
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from roles.rl.algorithms.base import Algorithm, Group
from roles.rl.algorithms.cispo import Cispo
from roles.rl.algorithms.dapo import Dapo
from roles.rl.algorithms.dr_grpo import DrGrpo
from roles.rl.algorithms.find import Objective, SharedOptions
from roles.rl.algorithms.grpo import Grpo
from roles.rl.algorithms.gspo import Gspo
from tests.support.losses import batch

trl = pytest.importorskip(
    "trl", reason="TRL's values need trl==1.16.0 (pip install trl==1.16.0)"
)

LIMIT, GROUP = 12, 4
EPSILON = 1e-4  # TRL's, in advantages
CASES: list[tuple[str, Algorithm, dict[str, Any]]] = [
    ("grpo", Grpo(advantage_epsilon=EPSILON), {"loss_type": "dapo", "delta": 4.0}),
    ("dapo", Dapo(advantage_epsilon=EPSILON), {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("dr_grpo", DrGrpo(), {"loss_type": "dr_grpo"}),
    ("cispo", Cispo(advantage_epsilon=EPSILON), {"loss_type": "cispo", "epsilon_high": 5.0}),
    ("gspo", Gspo(advantage_epsilon=EPSILON, clip_low=0.03, clip_high=0.04),
     {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03,
      "epsilon_high": 0.04}),
]  # fmt: skip


def trl_loss(
    rows: dict[str, Tensor], *, beta: float = 0.0, entropy: float = 0.0, **settings: Any
) -> Tensor:
    """TRL's loss of padded rows; ``logps`` carries the gradient."""
    from accelerate import Accelerator
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    size, width = rows["logps"].shape
    values = {
        "args": SimpleNamespace(
            delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1
        ),
        "loss_type": settings["loss_type"],
        "importance_sampling_level": settings.get("importance_sampling_level", "token"),
        "epsilon_low": settings.get("epsilon", 0.2),
        "epsilon_high": settings.get("epsilon_high", 0.2),
        "beta": beta,
        "_entropy_bonus_enabled": bool(entropy),
        "entropy_coef": entropy,
        "use_adaptive_entropy": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LIMIT,
        "model": SimpleNamespace(training=True),
        "accelerator": Accelerator(cpu=True),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (
            rows["logps"],
            rows["entropies"],
            None,
        ),
    }
    for name, value in values.items():
        setattr(trainer, name, value)
    loss: Tensor = trainer._compute_loss(
        None,
        {
            "prompt_ids": torch.zeros(size, 1, dtype=torch.long),
            "prompt_mask": torch.ones(size, 1, dtype=torch.long),
            "completion_ids": torch.zeros(size, width, dtype=torch.long),
            "completion_mask": rows["mask"],
            "advantages": rows["advantages"],
            "old_per_token_logps": rows["old"],
            "ref_per_token_logps": rows["reference"],
            "importance_sampling_ratio": rows["weights"],
            "num_items_in_batch": rows["mask"].sum(),
        },
    )
    return loss


@pytest.mark.parametrize(
    ("name", "algorithm", "settings"), CASES, ids=[one[0] for one in CASES]
)
@pytest.mark.parametrize("spread", [0.05, 1.5])
def test_a_loss_and_its_gradient_are_those_of_trl(
    name: str, algorithm: Algorithm, settings: dict[str, Any], spread: float
) -> None:
    rng = Random(7)
    lengths = [rng.randint(1, LIMIT) for _ in range(3 * GROUP)]
    rewards = [rng.random() for _ in lengths]
    old = [-4 * rng.random() for _ in range(sum(lengths))]
    current = [one + spread * rng.gauss(0, 1) for one in old]
    sampler = [one + 0.5 * rng.gauss(0, 1) for one in old]
    reference = [one + 0.5 * rng.gauss(0, 1) for one in old]

    groups = [
        Group(
            rewards=tuple(rewards[at : at + GROUP]),
            lengths=tuple(lengths[at : at + GROUP]),
            ended=(True,) * GROUP,
            limit=LIMIT,
        )
        for at in range(0, len(lengths), GROUP)
    ]
    by_row = [float(one) for each in algorithm.advantages(groups) for one in each]
    scores = torch.tensor(rewards).view(-1, GROUP)
    centred = scores - scores.mean(1, keepdim=True)
    scale = 1.0 if name == "dr_grpo" else scores.std(1, keepdim=True) + EPSILON
    assert by_row == pytest.approx((centred / scale).flatten().tolist(), abs=1e-5)

    per_token = [
        one for one, length in zip(by_row, lengths, strict=True) for _ in range(length)
    ]
    tokens, sequences = batch(
        current, old, per_token, lengths, sampler=sampler, reference=reference, limit=LIMIT
    )
    # TRL divides its terms for the reference as it divides the loss, we by tokens always
    is_by_token = settings["loss_type"] in ("dapo", "cispo")
    shared = {"kl_reference": 0.1 if is_by_token else 0.0, "entropy": 0.02}
    mine, _ = Objective(name, algorithm, SharedOptions(**shared)).loss(tokens, sequences)
    torch.autograd.backward(mine)

    rows = {
        one: padded(getattr(tokens, one).detach(), lengths)
        for one in ("logprobs", "old", "reference", "weights", "entropy")
    }
    rows |= {"logps": rows["logprobs"].requires_grad_()}
    rows |= {"entropies": rows["entropy"].requires_grad_()}
    rows |= {"mask": padded(torch.ones(sum(lengths)), lengths)}
    rows |= {"advantages": torch.tensor(by_row, dtype=torch.float64)}
    theirs = trl_loss(rows, beta=shared["kl_reference"], entropy=0.02, **settings)
    torch.autograd.backward(theirs)

    assert mine.item() == pytest.approx(theirs.item(), abs=1e-5)
    for ours, wanted in ((tokens.logprobs, "logps"), (tokens.entropy, "entropies")):
        grad = rows[wanted].grad
        assert ours.grad is not None
        assert grad is not None
        torch.testing.assert_close(padded(ours.grad, lengths), grad, atol=1e-5, rtol=0)


def test_the_soft_overlong_penalty_is_trls() -> None:
    from trl.rewards import get_soft_overlong_punishment

    lengths = (30, 80, 81, 90, 100)
    punish = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    wanted = punish([[1] * one for one in lengths])
    group = Group(rewards=tuple(wanted), lengths=(1,) * 5, ended=(True,) * 5, limit=100)
    punished = Group(rewards=(0.0,) * 5, lengths=lengths, ended=(True,) * 5, limit=100)
    dapo = Dapo(overlong_buffer=20)
    assert dapo.advantages([punished])[0] == pytest.approx(dapo.advantages([group])[0])


def padded(values: Tensor, lengths: list[int]) -> Tensor:
    """(tokens,) as (completions, longest), zeros on the right."""
    parts = torch.split(values, lengths)
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
