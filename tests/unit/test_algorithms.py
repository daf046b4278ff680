"""The losses and advantages of the shipped algorithms, against values worked out by hand."""

import math
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2p.errors import ConfigError
from p2p.node.entries import load
from p2p.node.tables import read_table
from roles.contract.core.sampling import SamplingTerms
from roles.engines.base import Completion, TrainingGroup
from roles.engines.config import EngineConfig
from roles.rl.algorithms.base import Algorithm, Group, Sequences, Tokens, k3
from roles.rl.algorithms.cispo import Cispo
from roles.rl.algorithms.dapo import Dapo
from roles.rl.algorithms.dr_grpo import DrGrpo
from roles.rl.algorithms.find import Objective, SharedOptions, find_algorithm
from roles.rl.algorithms.grpo import Grpo
from roles.rl.algorithms.gspo import Gspo
from roles.rl.learner import LearnerConfig
from roles.rl.recipes import SORTER
from tests.support.losses import batch, vector
from tests.support.packages import install

ALL: list[Algorithm] = [Grpo(), Dapo(), DrGrpo(), Cispo(), Gspo()]


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [
        (1, 0.5, -0.5, -0.5), (1, 1.1, -1.1, -1.1), (1, 1.5, -1.2, 0), (1, 100, -1.2, 0),
        (-1, 0.5, 0.8, 0), (-1, 0.9, 0.9, 0.9), (-1, 1.5, 1.5, 1.5), (-1, 3.9, 3.9, 3.9),
        (-1, 4.5, 4.0, 0), (-1, 100, 4.0, 0),
    ],
)  # fmt: skip
def test_one_token_of_grpo(
    advantage: float, ratio: float, loss: float, gradient: float
) -> None:
    tokens, sequences = batch([math.log(ratio)], [0.0], [advantage], [1])
    value, metrics = Grpo().loss(tokens, sequences)
    torch.autograd.backward(value)
    assert value.item() == pytest.approx(loss)
    assert gradient_of(tokens) == pytest.approx([gradient])
    assert metrics["clipped"].item() is (gradient == 0)


@pytest.mark.parametrize(
    ("difference", "value", "gradient"),
    [(0.1, 0.005171, -0.105171), (-0.3, 0.040818, 0.259182), (1.0, 0.718282, -1.718282)],
)
def test_k3(difference: float, value: float, gradient: float) -> None:
    current = vector(-1.0).requires_grad_()
    estimate = k3(vector(-1.0 + difference), current)
    torch.autograd.backward(estimate.sum())
    assert current.grad is not None
    assert estimate.item() == pytest.approx(value, abs=1e-6)
    assert current.grad.item() == pytest.approx(gradient, abs=1e-6)


def group(*rewards: float, lengths: Sequence[int] = (), limit: int = 100) -> Group:
    return Group(
        rewards=rewards,
        lengths=tuple(lengths) or (10,) * len(rewards),
        ended=(True,) * len(rewards),
        limit=limit,
    )


def test_advantages_are_relative_to_the_group() -> None:
    groups = [group(1, 0), group(1, *[0] * 7)]
    for algorithm in (Grpo(), Dapo(), Cispo(), Gspo()):
        first, second = algorithm.advantages(groups)
        assert first.dtype == np.float32
        assert first == pytest.approx([0.707106, -0.707106], abs=1e-6)
        assert second == pytest.approx([2.474867] + [-0.353552] * 7, abs=1e-6)
    (without_spread,) = DrGrpo().advantages([group(1, 0, 0, 0)])
    assert without_spread == pytest.approx([0.75, -0.25, -0.25, -0.25])
    with pytest.raises(ValueError, match="two completions"):
        Grpo().advantages([group(1)])


def test_dapo_takes_something_off_answers_near_the_limit() -> None:
    (found,) = Dapo(overlong_buffer=20).advantages(
        [group(1, 1, 1, 0, lengths=(80, 90, 100, 10))]
    )
    (plain,) = Grpo().advantages([group(1, 0.5, 0, 0)])
    assert found == pytest.approx(plain)


@pytest.mark.parametrize("algorithm", ALL, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(("one", "other"), [(0.0, -65504.0), (-65504.0, 0.0), (-1.0, -400.0)])
def test_losses_are_numbers_however_far_log_probs_are_apart(
    algorithm: Algorithm, one: float, other: float
) -> None:
    """A ratio of e^89 is infinite in float32, and its clipped gradient no number."""
    objective = Objective("any", algorithm, SharedOptions(kl_sampler=1.0, kl_reference=1.0))
    for advantage in (1.0, -1.0):
        tokens, sequences = batch([one], [other], [advantage], [1], reference=[other])
        value, _ = objective.loss(tokens, sequences)
        torch.autograd.backward(value)
        assert math.isfinite(value.item())
        assert all(map(math.isfinite, gradient_of(tokens)))


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("ppo", {}, "no algorithm 'ppo'; installed are cispo, dapo, dr_grpo, grpo, gspo"),
        ("grpo", {"cap": 2}, "'grpo' has no option 'cap': its options are advantage_epsilon,"),
        ("grpo", {"clip_negative": 1.1}, "clip_negative must exceed 1 \\+ clip"),
        ("grpo", {"entropy": -1}, "entropy is from 0 to 1e\\+06, not -1"),
        ("dapo", {"clip_low": "wide"}, "the algorithm 'dapo': "),
    ],
)
def test_a_wrong_choice_is_one_sentence(
    name: str, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        find_algorithm(name, options)


def gradient_of(tokens: Tokens) -> list[float]:
    assert tokens.logprobs.grad is not None
    numbers: list[float] = tokens.logprobs.grad.tolist()
    return numbers


def test_the_documents_own_algorithm_is_found_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/extending.md, typed and installed as it says."""
    page = (Path(__file__).parents[2] / "docs/extending.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## A learning algorithm\n")
    source, package, choice = re.findall(r"```(?:python|toml)\n(.*?)```", section, re.DOTALL)[
        :3
    ]
    assert len(source.splitlines()) <= 40
    points = tomllib.loads(package)["project"]["entry-points"]["shoal.algorithms"]
    lines = [f"{name} = {target}" for name, target in points.items()]
    install(tmp_path, "leave-one-out", *lines, group="shoal.algorithms")
    (tmp_path / "leave_one_out.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = read_table(LearnerConfig, {"rate": 1e-4, **tomllib.loads(choice)}, "learner.toml")

    objective = find_algorithm(chosen.algorithm, chosen.options)
    assert objective.shared.entropy == 0.001
    (found,) = objective.advantages([group(1, 0, 0)])
    assert found == pytest.approx([1.0, -0.5, -0.5])
    current = [math.log(2.0), 0.0, math.log(0.5)]
    value, metrics = objective.loss(*batch(current, [0.0] * 3, found.tolist(), [1, 1, 1]))
    assert value.item() == pytest.approx((-1.3 + 0.5 + 0.5 * 0.7) / 3 - 0.001 * 1.1)
    assert metrics["clipped"].tolist() == [True, False, True]
    with pytest.raises(ConfigError, match="'leave-one-out': clip is between 0 and 1"):
        find_algorithm("leave-one-out", {"clip": 2})


# Algorithms of installed packages that raise, exit or answer nonsense


GROUP = Group(rewards=(0.0, 1.0), lengths=(1, 1), ended=(True, True), limit=4)
LESSON = TrainingGroup((1, 2), 2 * (Completion((3, 0), (-1.0, -1.0)),), (0.0, 1.0))


def right_loss(tokens: Tokens) -> Any:
    return -(tokens.logprobs * tokens.advantages).sum() / tokens.total


@dataclass(frozen=True)
class Own:
    gives: Callable[[Sequence[Group]], Any] = lambda groups: [np.ones(2) for _ in groups]
    loses: Callable[[Tokens], Any] = lambda tokens: (right_loss(tokens), {})

    def advantages(self, groups: Sequence[Group]) -> Any:
        return self.gives(groups)

    def loss(self, tokens: Tokens, sequences: Sequences) -> Any:
        return self.loses(tokens)


def fails(_: object) -> Any:
    return {}["x"]


@pytest.mark.parametrize(
    "gives",
    [
        fails, lambda groups: None, lambda groups: 5, lambda groups: [1.0],
        lambda groups: [["a", "b"]], lambda groups: [[1, [2]]],
        lambda groups: [np.full(2, np.nan)], lambda groups: [np.full(2, 1e39)],
        lambda groups: sys.exit(3),
    ],
)  # fmt: skip
def test_advantages_that_are_none(gives: Callable[[Any], Any]) -> None:
    """A KeyError ended five processes in a row, and the node asked for more memory."""
    with pytest.raises(ConfigError, match=r"advantages\(\) of the algorithm 'own'"):
        Objective("own", Own(gives)).advantages([GROUP])


@pytest.mark.parametrize(
    "loses",
    [
        fails,
        lambda tokens: None,
        right_loss,
        lambda tokens: (1.0, {}),
        lambda tokens: (tokens.logprobs, {}),
        lambda tokens: (right_loss(tokens).detach(), {}),
        lambda tokens: (right_loss(tokens).to(torch.complex64), {}),
        lambda tokens: (torch.ones((), requires_grad=True) * 2, {}),
        lambda tokens: (right_loss(tokens), None),
        lambda tokens: (right_loss(tokens), {"m": "x"}),
        lambda tokens: (right_loss(tokens), {"m": 1.0}),
        lambda tokens: sys.exit(3),
    ],
)
def test_losses_that_are_none(loses: Callable[[Tokens], Any]) -> None:
    from roles.engines.torch.learner import TorchLearner

    sampling = SamplingTerms(steps=4, group_size=2, max_new_tokens=4)
    learner = TorchLearner(
        EngineConfig(
            context=64, shape=SORTER, sampling=sampling, learner=LearnerConfig(rate=0.1)
        )
    )
    learner.objective = Objective("own", Own(loses=loses))
    with pytest.raises(ConfigError, match=r"loss\(\) of the algorithm 'own'"):
        learner.step([LESSON])


@pytest.mark.parametrize("text", ["1 / 0", "def (", "raise SystemExit(4)", "import nowhere"])
def test_what_a_package_raises_at_its_import_is_one_sentence(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but an ImportError was a traceback."""
    (tmp_path / "own_torn.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="the algorithm 'own' cannot be loaded from own_torn"):
        load("own_torn:Own", "own", "algorithm")
