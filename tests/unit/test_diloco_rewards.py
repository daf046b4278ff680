"""Members that learn from rewards: GRPO as inner steps, averaged as DiLoCo averages any."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from p2p.errors import ConfigError
from roles.contract.core.diloco import DilocoTerms, Goal, Outer
from roles.diloco.core.outer import Arithmetic
from roles.diloco.core.quant import Values
from roles.diloco.material import Rewards
from roles.engines.config import EngineConfig
from roles.envs.base import open_teaching
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, open_mix
from roles.envs.sort import decode, is_held_out
from roles.rl.recipes import SORTER
from tests.support.pieces import exchange
from tests.support.toys import sorting_engine, sorting_learner

MEMBERS = 2
TERMS = DilocoTerms(
    goal=Goal.REWARD, outer_steps=3, inner_steps=16, sequences=24, rate=1e-3, warmup=0,
    gradient_norm=0.1, held_out=192,
)  # fmt: skip
TAUGHT = sorting_engine(learner=sorting_learner())


def rewards(terms: DilocoTerms = TERMS, config: EngineConfig = TAUGHT) -> Rewards:
    environment = open_mix(EnvironmentSetup(parts=(EnvironmentPart(name="sort"),)))
    return Rewards(environment, open_teaching("sort"), config, terms)


def member(terms: DilocoTerms = TERMS, config: EngineConfig = TAUGHT):  # type: ignore[no-untyped-def]
    pytest.importorskip("torch")
    from roles.diloco.pretrain import Pretrainer

    found = rewards(terms, config)
    return Pretrainer(terms, None, found, config), found


@pytest.mark.deep
def test_two_members_that_average_what_rewards_taught_them_answer_better() -> None:
    """From the end of a warm-up, with nothing but right and wrong, in three rounds of int4."""
    warm_up = replace(TERMS, sequences=1)
    first, examples = member(warm_up, sorting_engine())
    first.train(examples.batches(0, 0, 400), 0)
    members = [member() for _ in range(MEMBERS)]
    arithmetic = Arithmetic(TERMS, first.size)
    state = arithmetic.begun(first.vector())
    wrong = [wrong_share(members, state[0])]
    for step in range(TERMS.outer_steps):
        for rank, (trainer, material) in enumerate(members):
            trainer.load(state[0])
            window, begin = (step * MEMBERS + rank) * TERMS.phase_windows, 16 * step
            steps, tokens, _ = trainer.train(material.batches(window, begin, 16), begin)
            assert steps == 16
            assert tokens == 16 * 24 <= TERMS.phase_tokens
        exchange(arithmetic, state, [one.update() for one, _ in members], step + 1)
        wrong.append(wrong_share(members, state[0]))
    assert wrong[-1] < wrong[0] - 0.1, wrong


def wrong_share(members, weights: Values) -> float:  # type: ignore[no-untyped-def]
    trainer, material = members[0]
    trainer.load(weights)
    return float(trainer.loss(material.held_out()))


def test_members_draw_disjoint_questions_that_are_the_same_wherever_they_are_drawn() -> None:
    one, two = rewards(), rewards()
    asked = [batch for rank in range(3) for batch in one.batches(rank * 288, 0, 12)]
    numbers = [question.number for batch in asked for question in batch]
    assert numbers == list(range(3 * 288))
    assert two.batches(288, 0, 12) == one.batches(288, 0, 12)
    assert len({question.seed for batch in asked for question in batch}) == len(numbers)
    group = asked[0][0].group(16)
    assert len(set(group.seeds)) == 16
    assert not any(is_held_out(decode(one.task.prompt)) for batch in asked for one in batch)
    other = rewards(config=replace(TAUGHT, seed=1))
    assert other.batches(0, 0, 1) != one.batches(0, 0, 1)


def test_groups_without_a_spread_of_rewards_leave_the_weights_as_they_are() -> None:
    """Untaught, nothing is right: there is no gradient, and Adam's moments must not drift."""
    trainer, material = member()
    before = trainer.vector()
    _, _, loss = trainer.train(material.batches(0, 0, 2), 0)
    assert loss == 1.0
    assert np.array_equal(trainer.vector(), before)
    parallel = replace(TERMS, outer=Outer.PARALLEL, inner_steps=1)
    trainer, material = member(parallel)
    trainer.train(material.batches(0, 0, 1), 0)
    assert not trainer.update().any()


def test_an_environment_with_more_tokens_than_the_model_is_refused() -> None:
    small = replace(TAUGHT, shape=replace(SORTER, vocabulary=49))
    with pytest.raises(ConfigError, match="50 tokens, the model 49"):
        rewards(config=small)
