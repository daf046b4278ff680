"""A packed group gives the states, the loss and the gradients of its completions row by row."""

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from proofs import toploc
from proofs.sampling import DrawRule
from roles.contract.core.shape import Family
from roles.engines.base import (
    Completion,
    EngineError,
    Group,
    GroupTask,
    Row,
    Sampling,
    TrainingGroup,
    with_inserted,
)
from roles.engines.codec import decode_group, decode_training, encode_group, encode_training
from roles.engines.config import ROWS
from roles.engines.torch import gradient, sampler, scorer
from roles.engines.torch.gradient import (
    Aim,
    LearningBatch,
    Tally,
    add_gradient,
    learning_batches,
    old_log_probs,
)
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.model import TransformerModel, Unpacking
from roles.engines.torch.packing import PackedBatch, pack
from roles.rl.algorithms.find import Objective, find_algorithm
from tests.support.models import SHAPES
from tests.support.tasks import make_tasks
from tests.support.toys import sorting_engine, sorting_learner

Groups = list[tuple[tuple[int, ...], list[tuple[int, ...]]]]


def packed(groups: Groups, **options: int) -> list[PackedBatch]:
    return pack(
        [(prompt, [Completion(one) for one in answers]) for prompt, answers in groups],
        **options,
    )


def initialised(family: Family) -> TransformerModel:
    model = TransformerModel(SHAPES[family])
    model.initialise(5)
    return model


@pytest.fixture(params=SHAPES, ids=lambda family: family.value)
def model(request: pytest.FixtureRequest) -> TransformerModel:
    model = initialised(request.param)
    rng = torch.Generator().manual_seed(6)
    with torch.no_grad():  # norms and biases are drawn too, lest a neutral one hide a mistake
        for weight in model.parameters():
            if weight.dim() < 2:
                weight.add_(0.3 * torch.randn(weight.shape, generator=rng))
    return model


def some_groups(seed: int = 0, count: int = 5, size: int = 4, longest: int = 9) -> Groups:
    rng = Random(seed)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(97) for _ in range(length))

    return [
        (draw(rng.randint(1, 12)), [draw(rng.randint(1, longest)) for _ in range(size)])
        for _ in range(count)
    ]


def alone(model: TransformerModel, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    states: Tensor = model(torch.tensor([prompt + answer[:-1]]))
    return states[0, len(prompt) - 1 :]


def one_by_one(model: TransformerModel, groups: Groups, batches: list[PackedBatch]) -> Tensor:
    return torch.cat(
        [
            alone(model, groups[piece.group][0], groups[piece.group][1][piece.completion])
            for batch in batches
            for piece in batch.pieces
        ]
    )


@pytest.mark.parametrize("is_long", [False, True])
def test_packed_states_and_gradients_are_those_of_rows(
    model: TransformerModel, is_long: bool
) -> None:
    """Also of eight answers of 24 tokens to each of two prompts, which lie beside each other in
    attention."""
    groups = some_groups(seed=2, count=2, size=8, longest=24) if is_long else some_groups(1)
    batches = packed(groups)
    assert [isinstance(batch.seen, Unpacking) for batch in batches].count(True) == is_long
    targets = torch.cat([batch.answers for batch in batches])
    found = []
    for states in (
        torch.cat([batch.hidden(model) for batch in batches]),
        one_by_one(model, groups, batches),
    ):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model.lm_head(states), targets)
        torch.autograd.backward(loss)
        found.append([states, loss, *(one.grad for one in model.parameters())])
    for mine, single in zip(*found, strict=True):
        assert mine is not None
        assert single is not None
        torch.testing.assert_close(mine, single, atol=1e-5, rtol=0)


def what_is_seen(batch: PackedBatch) -> Tensor:
    """(rows, 1, length, length), True is seen."""
    rows, width = batch.tokens.shape
    if isinstance(batch.seen, Tensor):
        return batch.seen
    if batch.seen is None:
        return torch.ones(rows, 1, width, width, dtype=torch.bool).tril()
    _, longest = batch.seen.places.shape
    mask = torch.zeros(rows, 1, width, width, dtype=torch.bool)
    for position, place in enumerate(batch.seen.back.tolist()):
        sequence, last = divmod(place, longest)
        line = batch.seen.places[sequence, : last + 1]
        if line[-1] == position:  # the back of a pad is any position
            mask[position // width, 0, position % width, line % width] = True
            assert set((line // width).tolist()) == {position // width}
    return mask


LENGTHS = st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=9))


@given(st.lists(LENGTHS, min_size=1, max_size=9), st.integers(1, 200), st.integers(1, 100))
def test_every_token_is_behind_its_own(
    lengths: list[tuple[int, list[int]]], batch_tokens: int, row_tokens: int
) -> None:
    """Whatever the shapes: a state sees, in order, the prompt and what it was drawn after."""
    numbers = iter(range(10**6))

    def fresh(length: int) -> tuple[int, ...]:
        return tuple(next(numbers) for _ in range(length))

    groups = [(fresh(first), [fresh(one) for one in rest]) for first, rest in lengths]
    seen = 0
    for batch in packed(groups, batch_tokens=batch_tokens, row_tokens=row_tokens):
        rows, width = batch.tokens.shape
        assert rows == 1 or rows * width <= batch_tokens
        mask = what_is_seen(batch)
        places = iter(batch.behind.tolist())
        for piece in batch.pieces:
            prompt, completions = groups[piece.group]
            answer = completions[piece.completion]
            for drawn in range(piece.length):
                row, column = divmod(next(places), width)
                visible = mask[row, 0, column]
                assert tuple(batch.tokens[row][visible].tolist()) == prompt + answer[:drawn]
                assert batch.positions[row][visible].tolist() == list(
                    range(len(prompt) + drawn)
                )
            seen += 1
    assert seen == sum(len(completions) for _, completions in groups)


def test_a_group_is_a_third_of_its_rows() -> None:
    """Eight answers of 7 tokens to a prompt of 26: 74 positions, not 256."""
    (batch,) = packed([(tuple(range(26)), [tuple(range(7))] * 8)])
    assert batch.tokens.shape == (1, 74)


def test_what_is_empty_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        packed([((), [(1,)])])
    with pytest.raises(ValueError, match="empty"):
        packed([((1,), [(1,), ()])])


# Completions of several turns


END = 1


@pytest.fixture
def qwen3() -> TransformerModel:
    return initialised(Family.QWEN3)


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


def states_alone(qwen3: TransformerModel, group: TrainingGroup, number: int) -> torch.Tensor:
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
        states: torch.Tensor = qwen3(torch.tensor([text]))[0, behind]
    return states


@pytest.mark.parametrize(("row_tokens", "longest"), [(1024, 9), (40, 9), (1, 9), (1024, 60)])
def test_a_packed_turn_has_the_states_of_a_plain_text(
    qwen3: TransformerModel, row_tokens: int, longest: int
) -> None:
    group = some_group(longest=longest)
    for batch in pack([(group.prompt, group.completions)], row_tokens=row_tokens):
        with torch.no_grad():
            states = batch.hidden(qwen3)
        numbers = [piece.completion for piece in batch.pieces]
        drawn = [group.completions[number].tokens for number in numbers]
        assert batch.answers.tolist() == [token for tokens in drawn for token in tokens]
        alone = torch.cat([states_alone(qwen3, group, number) for number in numbers])
        torch.testing.assert_close(states, alone, atol=1e-5, rtol=0)


def test_what_was_inserted_carries_no_loss(qwen3: TransformerModel) -> None:
    group = some_group()
    tokens = [one.tokens for one in group.completions]
    advantages = [np.array([1.0, -1.0, 0.5, -0.5, 0.25], np.float32)]
    (batch,) = learning_batches([group], advantages)
    assert len(batch) == sum(map(len, tokens))
    found = old_log_probs(qwen3, batch, 1.0)
    every = [
        qwen3.lm_head(states_alone(qwen3, group, piece.completion)).log_softmax(-1)
        for piece in batch.packed.pieces
    ]
    wanted = torch.cat(every).gather(-1, batch.packed.answers[:, None]).squeeze(-1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    aim = Aim(
        objective=find_algorithm("gspo"), temperature=1.0, limit=64, tokens=len(batch),
        sequences=len(tokens),
    )  # fmt: skip
    assert add_gradient(qwen3, batch, aim).tokens == len(batch)


@pytest.mark.parametrize("longest", [9, 200])
def test_proofs_stand_at_drawn_tokens(qwen3: TransformerModel, longest: int) -> None:
    group = some_group(longest=longest)
    sampling = Sampling(1.0, 4096, len(group.completions))
    proven = []
    for number, one in enumerate(group.completions):
        states = states_alone(qwen3, group, number).numpy()
        (proof,) = toploc.commit([states], sampling.proof_values)
        proven.append(Completion(one.tokens, (), proof, one.turns))
    task = GroupTask(0, group.prompt, tuple(bytes([one]) * 32 for one in range(5)))
    (scored,) = scorer.score(
        qwen3, [task], [Group(0, tuple(proven))], sampling, frozenset({END})
    )
    assert scored.evidence.tokens == sum(len(one.tokens) for one in proven)
    assert not scored.evidence.malformed
    assert scored.evidence.exponent_mismatches == 0
    deaf = [Completion(one.tokens, (), one.proof) for one in proven]
    (other,) = scorer.score(qwen3, [task], [Group(0, tuple(deaf))], sampling, frozenset({END}))
    assert other.evidence.exponent_mismatches > 0 or other.evidence.mantissa_worst > 100


def test_turns_cross_to_the_engine() -> None:
    training, turns = some_group(), some_group().completions[3].turns
    assert decode_training(encode_training(training)).completions[3].turns == turns
    group = decode_group(encode_group(Group(4, training.completions)))
    assert group.completions[3].turns == turns


def test_completions_that_wait_for_an_answer_do_not_keep_the_engine_busy(
    qwen3: TransformerModel,
) -> None:
    drawing = sampler.Sampler(qwen3, frozenset(range(97)), DrawRule.CDF)
    tasks = make_tasks(3, ROWS // 2 + 1)  # more completions than there are places
    drawing.add(tasks, Sampling(1.0, 12, 4, turns=2, heard=1))
    while drawing.has_work:
        for _ in range(10 * 12):
            drawing.step()
        assert not drawing.can_step
        drawing.hear([Row(row.group, row.slot, (1,)) for row in drawing.paused()])
    assert [len(group.completions) for _, group in drawing.take_ended()] == [129] * 3


def test_a_token_outside_the_vocabulary_is_our_mistake(qwen3: TransformerModel) -> None:
    group = Group(0, (Completion((1, 97), (-1.0, -1.0)),))
    with pytest.raises(EngineError, match="vocabulary"):
        scorer.score(qwen3, make_tasks(1), [group], Sampling(1.0, 12, 4), frozenset({END}))


# The gradient of a step


TEMPERATURE = 0.7
GRPO = find_algorithm("grpo", {"kl_sampler": 0.1})


def drawn_groups() -> list[TrainingGroup]:
    rng = Random(3)

    def drawn(answer: tuple[int, ...]) -> Completion:
        return Completion(answer, tuple(-6 * rng.random() for _ in answer))

    return [
        TrainingGroup(prompt, tuple(map(drawn, answers)), ())
        for prompt, answers in some_groups(3)
    ]


ADVANTAGES = [np.array([1.0, -0.5, 0.25, -0.75], np.float32)] * 5


def aim(batches: list[LearningBatch], objective: Objective = GRPO) -> Aim:
    return Aim(
        objective=objective,
        temperature=TEMPERATURE,
        limit=9,
        tokens=sum(map(len, batches)),
        sequences=sum(len(one.packed.pieces) for one in batches),
    )


def gradients(
    model: TransformerModel,
    row_tokens: int = 1024,
    *,
    is_later: bool = False,
    objective: Objective = GRPO,
) -> tuple[Tally, list[Tensor]]:
    """What the groups add up to; ``is_later`` moves the policy after its log-probs were
    taken."""
    batches = learning_batches(drawn_groups(), ADVANTAGES, row_tokens=row_tokens)
    old = [old_log_probs(model, one, TEMPERATURE) + 0.3 for one in batches]
    model.zero_grad()
    tally = Tally()
    for batch, before in zip(batches, old, strict=True):
        reference = before - 0.1 if objective.shared.kl_reference else None
        wanted = aim(batches, objective)
        tally += add_gradient(model, batch, wanted, before if is_later else None, reference)
    return tally, [torch.clone(one.grad) for one in model.parameters() if one.grad is not None]


def assert_same(
    one: tuple[Tally, list[Tensor]], other: tuple[Tally, list[Tensor]], atol: float = 1e-5
) -> None:
    assert one[0].tokens == other[0].tokens
    assert one[0].loss == pytest.approx(other[0].loss, rel=1e-4, abs=atol)
    assert one[0].ratio_max == pytest.approx(other[0].ratio_max, rel=1e-4)
    assert one[0].sums == pytest.approx(other[0].sums, rel=1e-4, abs=atol)
    for mine, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {"kl_sampler": 0.1}),
        ("dr_grpo", {"kl_reference": 0.1}),
        ("cispo", {"entropy": 0.1}),
        ("gspo", {"clip_low": 0.5, "clip_high": 0.5}),
    ],
)
def test_a_head_in_slices_is_the_head(
    name: str, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slice of 7 cuts completions in two; a loss over whole completions does not notice."""
    model = initialised(Family.QWEN3)
    objective = find_algorithm(name, options)
    whole = gradients(model, is_later=True, objective=objective)
    monkeypatch.setattr(gradient, "SLICE", 7)
    assert_same(gradients(model, is_later=True, objective=objective), whole)


def test_logits_of_one_slice_are_all_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = initialised(Family.LLAMA)
    monkeypatch.setattr(gradient, "SLICE", 7)
    sizes = []

    def note(_: object, __: object, logits: Tensor) -> None:
        sizes.append(len(logits))

    model.lm_head.register_forward_hook(note)
    tally, _ = gradients(model)
    assert max(sizes) == 7
    # for the old log-probs, to measure, and for the gradient, but for each batch's first slice
    assert 2 * tally.tokens < sum(sizes) < 3 * tally.tokens


def test_the_loss_is_the_mean_over_tokens_by_hand() -> None:
    """A long answer and a short one: each of their tokens counts the same."""
    model = initialised(Family.QWEN3)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every log-prob is -log 97
    drawn = -math.log(97)
    group = TrainingGroup(
        (1, 2),
        (
            Completion((3, 4, 5, 6, 7, 8), (drawn,) * 6),
            # twice as likely now as when it was drawn, and more than the cap of 2
            Completion((9, 10), (drawn - math.log(2), drawn - 9)),
        ),
        (1.0, 0.0),
    )
    (batch,) = learning_batches([group], [np.array([1.0, -1.0], np.float32)])
    tally = add_gradient(model, batch, aim([batch], find_algorithm("grpo")))
    assert tally.tokens == 8
    assert tally.loss == pytest.approx((-6 * 1.0 + 2 * 2.0) / 8)
    assert tally.sums["capped"] == 2
    assert tally.sums["entropy"] / 8 == pytest.approx(math.log(97))
    assert tally.ratio_max == 1.0
    assert tally.sums["clipped"] == 0


def test_every_token_of_a_step_counts_the_same_in_whatever_minibatch() -> None:
    groups = drawn_groups()
    shape = SHAPES[Family.QWEN3]
    losses = []
    for minibatches in (1, 3, 8):
        rules = sorting_learner(minibatches=minibatches, rate=0.0)
        learner = TorchLearner(sorting_engine(shape=shape, learner=rules))
        learner.model.initialise(2)
        report = learner.update(groups, ADVANTAGES)
        assert report.tokens == sum(len(c.tokens) for g in groups for c in g.completions)
        losses.append((report.loss, report.k3, report.entropy, report.capped, report.changed))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] == 0.0  # at a rate of 0 nothing changes


def test_bfloat16_products_leave_float32_gradients_close_to_the_right_ones() -> None:
    model = initialised(Family.LLAMA)
    _, exact = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        _, rounded = gradients(model)
    for mine, theirs in zip(rounded, exact, strict=True):
        assert mine.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), 0)
        assert cosine > 0.99
