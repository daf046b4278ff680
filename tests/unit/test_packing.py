"""A packed group gives the states, the loss and the gradients of its completions row by row."""

from random import Random

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from roles.engines.base import Completion
from roles.engines.torch.model import TransformerModel, Unpacking
from roles.engines.torch.packing import PackedBatch, pack
from tests.support.models import SHAPES

Groups = list[tuple[tuple[int, ...], list[tuple[int, ...]]]]


def packed(groups: Groups, **options: int) -> list[PackedBatch]:
    """`pack`, of completions of one turn."""
    return pack(
        [(prompt, [Completion(one) for one in answers]) for prompt, answers in groups],
        **options,
    )


@pytest.fixture(params=SHAPES.values(), ids=lambda shape: shape.family.value)
def model(request: pytest.FixtureRequest) -> TransformerModel:
    torch.set_num_threads(1)
    model = TransformerModel(request.param)
    model.initialise(5)
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
    """The states behind the tokens of one completion, read by itself."""
    states: Tensor = model(torch.tensor([prompt + answer[:-1]]))
    return states[0, len(prompt) - 1 :]


def one_by_one(model: TransformerModel, groups: Groups, batches: list[PackedBatch]) -> Tensor:
    """What the batches should hold, one after the other."""
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
