"""Completions of several turns: what was inserted between them is read, and nothing else."""

from random import Random

import numpy as np
import pytest
import torch

from proofs import toploc
from roles.contract.core.shape import Family
from roles.engines.base import (
    Completion,
    Group,
    GroupTask,
    Sampling,
    TrainingGroup,
    with_inserted,
)
from roles.engines.codec import decode_group, decode_training, encode_group, encode_training
from roles.engines.torch import scorer
from roles.engines.torch.gradient import Aim, add_gradient, learning_batches, old_log_probs
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.packing import pack
from roles.rl.algorithms.find import find_algorithm
from tests.support.models import SHAPES

END = 1


@pytest.fixture
def model() -> TransformerModel:
    torch.set_num_threads(1)
    model = TransformerModel(SHAPES[Family.QWEN3])
    model.initialise(5)
    return model


def some_completion(rng: Random, turns: int, longest: int = 9) -> Completion:
    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, 97) for _ in range(count))

    drawn = [(*words(rng.randint(0, longest)), END) for _ in range(turns)]
    tokens = tuple(token for turn in drawn for token in turn)
    completion = Completion(tokens, tuple(-6 * rng.random() for _ in tokens))
    inserted = [words(rng.randint(1, longest)) for _ in range(turns - 1)]
    return with_inserted(completion, inserted, {END})


def some_group(seed: int = 0, longest: int = 9) -> TrainingGroup:
    """Completions of one to four turns; one turn ends with its first token."""
    rng = Random(seed)
    completions = tuple(some_completion(rng, turns, longest) for turns in (1, 2, 3, 4, 2))
    prompt = tuple(rng.randrange(2, 97) for _ in range(7))
    return TrainingGroup(prompt, completions, (1.0, 0.0, 0.5, 0.0, 1.0))


def states_alone(model: TransformerModel, group: TrainingGroup, number: int) -> torch.Tensor:
    """The states behind a completion's drawn tokens, read by itself as one plain text."""
    completion = group.completions[number]
    text, start = list(group.prompt), 0
    behind = []
    for end, inserted in [(one.after, one.inserted) for one in completion.turns] + [
        (len(completion.tokens), ())
    ]:
        for token in completion.tokens[start:end]:
            behind.append(len(text) - 1)
            text.append(token)
        text += inserted
        start = end
    with torch.no_grad():
        states: torch.Tensor = model(torch.tensor([text]))[0, behind]
    return states


@pytest.mark.parametrize(("row_tokens", "longest"), [(1024, 9), (40, 9), (1, 9), (1024, 60)])
def test_a_packed_turn_has_the_states_of_a_plain_text(
    model: TransformerModel, row_tokens: int, longest: int
) -> None:
    group = some_group(longest=longest)
    for batch in pack([(group.prompt, group.completions)], row_tokens=row_tokens):
        with torch.no_grad():
            states = batch.hidden(model)
        numbers = [piece.completion for piece in batch.pieces]
        drawn = [group.completions[number].tokens for number in numbers]
        assert batch.answers.tolist() == [token for tokens in drawn for token in tokens]
        alone = torch.cat([states_alone(model, group, number) for number in numbers])
        torch.testing.assert_close(states, alone, atol=1e-5, rtol=0)


def test_what_was_inserted_carries_no_loss(model: TransformerModel) -> None:
    group = some_group()
    tokens = [one.tokens for one in group.completions]
    advantages = [np.array([1.0, -1.0, 0.5, -0.5, 0.25], np.float32)]
    (batch,) = learning_batches([group], advantages)
    assert len(batch) == sum(map(len, tokens))
    found = old_log_probs(model, batch, 1.0)
    every = [
        model.lm_head(states_alone(model, group, piece.completion)).log_softmax(-1)
        for piece in batch.packed.pieces
    ]
    wanted = torch.cat(every).gather(-1, batch.packed.answers[:, None]).squeeze(-1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    aim = Aim(
        objective=find_algorithm("gspo"),
        temperature=1.0,
        limit=64,
        tokens=len(batch),
        sequences=len(tokens),
    )
    assert add_gradient(model, batch, aim).tokens == len(batch)


@pytest.mark.parametrize("longest", [9, 200])
def test_proofs_stand_at_drawn_tokens(model: TransformerModel, longest: int) -> None:
    """A worker proves the states behind its drawn tokens; a scorer that reads what was inserted
    finds them there, in a packed row or in a long group."""
    group = some_group(longest=longest)
    sampling = Sampling(1.0, 4096, len(group.completions))
    proven = []
    for number, one in enumerate(group.completions):
        states = states_alone(model, group, number).numpy()
        (proof,) = toploc.commit([states], sampling.proof_values)
        proven.append(Completion(one.tokens, (), proof, one.turns))
    task = GroupTask(0, group.prompt, tuple(bytes([one]) * 32 for one in range(5)))
    (scored,) = scorer.score(
        model, [task], [Group(0, tuple(proven))], sampling, frozenset({END})
    )
    assert scored.evidence.tokens == sum(len(one.tokens) for one in proven)
    assert not scored.evidence.malformed
    assert scored.evidence.exponent_mismatches == 0
    deaf = [Completion(one.tokens, (), one.proof) for one in proven]
    (other,) = scorer.score(model, [task], [Group(0, tuple(deaf))], sampling, frozenset({END}))
    assert other.evidence.exponent_mismatches > 0 or other.evidence.mantissa_worst > 100


def test_turns_cross_to_the_engine() -> None:
    training = some_group()
    assert decode_training(encode_training(training)).completions[3].turns == (
        training.completions[3].turns
    )
    group = Group(4, training.completions)
    assert decode_group(encode_group(group)).completions[3].turns == (
        group.completions[3].turns
    )
