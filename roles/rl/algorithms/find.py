"""An algorithm by its name, with its options and those that every algorithm has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from p2p.errors import ConfigError
from p2p.node.entries import installed, load
from roles.rl.algorithms.base import Algorithm, Group, Sequences, Tokens, check_range, k3

if TYPE_CHECKING:
    from torch import Tensor

ENTRY_POINTS: Final = "shoal.algorithms"
"""Packages add algorithms under this entry point group: ``name = module:Class``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions:
    """Options of every algorithm, beside its own.

    Each term is a mean over the tokens of the minibatch, however the algorithm divides its
    loss.
    """

    importance_cap: float = 2.0
    """Cap of the weight exp(old - sampler) of a stale sampler's token. Truncated importance
    sampling, Yao et al. 2025."""

    kl_sampler: float = 0.0
    """Weight of k3 to the policy that drew, a pull towards the samplers."""

    kl_reference: float = 0.0
    """Weight of k3 to the model that the run began with, which the learner keeps beside the
    policy. The run must have a base."""

    entropy: float = 0.0
    """Weight of the bonus for the entropy of the distribution that each token is drawn from."""

    def __post_init__(self) -> None:
        for one in fields(self):
            check_range(one.name, getattr(self, one.name), 0.0, 1e6)


@dataclass(frozen=True, slots=True)
class Objective:
    """An algorithm with its options."""

    name: str
    algorithm: Algorithm
    shared: SharedOptions = SharedOptions()

    def advantages(self, groups: Sequence[Group]) -> list[NDArray[np.float32]]:
        """Return one advantage for each completion of each group.

        Raises:
            ConfigError: The algorithm gave others.
        """
        with self._blamed("advantages"), np.errstate(over="ignore"):
            made = self.algorithm.advantages(groups)
            found = [np.asarray(one, dtype=np.float32) for one in made]
        wanted = [(len(group.rewards),) for group in groups]
        if [one.shape for one in found] != wanted or not all(
            np.isfinite(one).all() for one in found
        ):
            raise ConfigError(
                f"advantages() of the algorithm {self.name!r} must return one finite number for"
                " each completion of each group: correct it, or choose another algorithm"
            )
        return found

    @contextmanager
    def _blamed(self, method: str) -> Iterator[None]:
        """Raise errors of the package's code in the block again, as `ConfigError`.

        An unexpected exception would end the worker process, and the next process at the same
        step. `MemoryError` and `RuntimeError` pass unchanged: torch raises them when the device
        runs out of memory.
        """
        try:
            yield
        except (MemoryError, RuntimeError):  # torch's own: the device may have no room
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{method}() of the algorithm {self.name!r} failed with"
                f" {type(error).__name__}: {error}: correct it, or choose another algorithm"
            ) from error

    def loss(self, tokens: Tokens, sequences: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the batch's part of the loss, shared terms included, and metrics per token.

        Raises:
            ConfigError: The algorithm's loss is no scalar, or follows from nothing.
        """
        with self._blamed("loss"):
            loss, found = self.algorithm.loss(tokens, sequences)
            is_scalar = not loss.shape and loss.requires_grad and loss.is_floating_point()
            metrics = {str(name): metric.detach() for name, metric in found.items()}
        if not is_scalar:
            raise ConfigError(
                f"loss() of the algorithm {self.name!r} must return a scalar that follows from"
                " tokens.logprobs: correct it, or choose another algorithm"
            )
        shared = self.shared
        metrics["capped"] = tokens.weights >= shared.importance_cap
        if shared.kl_sampler:
            away = k3(tokens.sampler, tokens.logprobs)
            loss = loss + shared.kl_sampler * away.sum() / tokens.total
        if tokens.reference is not None:
            away = k3(tokens.reference, tokens.logprobs)
            loss = loss + shared.kl_reference * away.sum() / tokens.total
            metrics["k3_reference"] = away.detach()
        if shared.entropy:
            loss = loss - shared.entropy * tokens.entropy.sum() / tokens.total
        return loss, metrics


def find_algorithm(name: str, options: Mapping[str, Any] | None = None) -> Objective:
    """Return the algorithm called ``name`` with these options, its own and shared ones.

    Raises:
        ConfigError: There is no such algorithm, it has no such option, or not with this value.
    """
    targets = {one: point.value for one, point in installed(ENTRY_POINTS).items()}
    if name not in targets:
        raise ConfigError(
            f"there is no algorithm {name!r}; installed are {', '.join(sorted(targets))}"
            f" (packages add their own under the entry point group {ENTRY_POINTS})"
        )
    kind: Any = load(targets[name], name, "algorithm")
    if not hasattr(kind, "__dataclass_fields__") or not all(
        hasattr(kind, one) for one in ("advantages", "loss")
    ):
        raise ConfigError(
            f"the algorithm {name!r} ({targets[name]}) must be a dataclass with the methods"
            " advantages and loss"
        )
    shared = {one.name: one.default for one in fields(SharedOptions)}
    own = {one.name: one.default for one in fields(kind)}
    given = dict(options or {})
    if unknown := given.keys() - own - shared.keys():
        raise ConfigError(
            f"the algorithm {name!r} has no option {', '.join(map(repr, sorted(unknown)))}:"
            f" its options are {', '.join(sorted(own | shared))}; remove the others from"
            " [options]"
        )
    for one, value in given.items():
        usual = {**shared, **own}[one]
        if type(usual) in (int, float) and type(value) not in (int, float):
            raise ConfigError(
                f"the algorithm {name!r}: {one} is a number, such as {usual}, not {value!r:.40}"
            )
    try:
        return Objective(
            name,
            kind(**{one: value for one, value in given.items() if one in own}),
            SharedOptions(
                **{one: value for one, value in given.items() if one in shared.keys() - own}
            ),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the algorithm {name!r}: {error}") from error
