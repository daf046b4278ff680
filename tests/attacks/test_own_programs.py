"""Algorithms of installed packages that raise, exit or answer nonsense: one sentence each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2p.errors import ConfigError
from p2p.node.entries import load
from roles.contract.core.sampling import SamplingTerms
from roles.engines.base import Completion, TrainingGroup
from roles.engines.config import EngineConfig
from roles.rl.algorithms.base import Group, Sequences, Tokens
from roles.rl.algorithms.find import Objective
from roles.rl.learner import LearnerConfig
from roles.rl.recipes import SORTER

torch = pytest.importorskip("torch")

GROUP = Group(rewards=(0.0, 1.0), lengths=(1, 1), ended=(True, True), limit=4)
LESSON = TrainingGroup((1, 2), 2 * (Completion((3, 0), (-1.0, -1.0)),), (0.0, 1.0))


def right(tokens: Tokens) -> Any:
    return -(tokens.logprobs * tokens.advantages).sum() / tokens.total


@dataclass(frozen=True)
class Own:
    gives: Callable[[Sequence[Group]], Any] = lambda groups: [np.ones(2) for _ in groups]
    loses: Callable[[Tokens], Any] = lambda tokens: (right(tokens), {})

    def advantages(self, groups: Sequence[Group]) -> Any:
        return self.gives(groups)

    def loss(self, tokens: Tokens, sequences: Sequences) -> Any:
        return self.loses(tokens)


def fails(_: object) -> Any:
    return {}["x"]


@pytest.mark.parametrize(
    "gives",
    [
        fails,
        lambda groups: None,
        lambda groups: 5,
        lambda groups: [1.0],
        lambda groups: [["a", "b"]],
        lambda groups: [[1, [2]]],
        lambda groups: [np.full(2, np.nan)],
        lambda groups: [np.full(2, 1e39)],
        lambda groups: sys.exit(3),
    ],
)
def test_advantages_that_are_none(gives: Callable[[Any], Any]) -> None:
    """A KeyError ended five processes in a row, and the node asked for more memory."""
    with pytest.raises(ConfigError, match=r"advantages\(\) of the algorithm 'own'"):
        Objective("own", Own(gives)).advantages([GROUP])


@pytest.mark.parametrize(
    "loses",
    [
        fails,
        lambda tokens: None,
        right,
        lambda tokens: (1.0, {}),
        lambda tokens: (tokens.logprobs, {}),
        lambda tokens: (right(tokens).detach(), {}),
        lambda tokens: (right(tokens).to(torch.complex64), {}),
        lambda tokens: (torch.ones((), requires_grad=True) * 2, {}),
        lambda tokens: (right(tokens), None),
        lambda tokens: (right(tokens), {"m": "x"}),
        lambda tokens: (right(tokens), {"m": 1.0}),
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
