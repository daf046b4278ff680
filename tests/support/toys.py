"""Engines of the network that sorts, with other numbers of its learner or its sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from roles.contract.core.sampling import SamplingTerms
from roles.engines.config import EngineConfig
from roles.rl.learner import LearnerConfig, WarmUp
from roles.rl.recipes import NETWORK

QUICK: Final = WarmUp(steps=60, rate=4e-3, batch=32, ramp=10)
"""Enough to see it learn something."""


def sorting_sampling(**changes: Any) -> SamplingTerms:
    return replace(NETWORK.sampling, **changes)


def sorting_learner(**changes: Any) -> LearnerConfig:
    """Return the learner's numbers; without ``warm_up`` it begins at drawn weights."""
    return replace(NETWORK.learner, **{"warm_up": None, **changes})


def sorting_engine(
    sampling: SamplingTerms = NETWORK.sampling,
    learner: LearnerConfig = NETWORK.learner,
    **changes: Any,
) -> EngineConfig:
    return EngineConfig(sampling=sampling, learner=learner, **changes)
