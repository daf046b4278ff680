"""The border of roles: what one says of itself for people ends no node.

`Role.run` is the job, and what it raises ends the node. ``health`` and ``progress`` only show.
A package's mistake in them takes its own panel away, is told once with the package's name, and
the node, its other roles and the run go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

logger = logging.getLogger(__name__)

FAILED: Final = "failed"
"""Key of the health of a role whose own cannot be had: why not."""


class Named(Protocol):
    """A role, as far as its mistakes are told."""

    @property
    def name(self) -> str:
        """In heartbeats, tables and logs."""
        ...


class Border:
    """Asks roles how they are, and outlives the answer."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], str] = {}
        """The last mistake of a role's method that was logged."""

    def health(self, role: Named, ask: Callable[[], object]) -> dict[str, object]:
        """What ``ask`` says, or ``{"failed": why}``."""
        said, why_not = self.ask(role, "health", ask, dict)
        return {FAILED: why_not} if why_not else said

    def ask(
        self, role: Named, method: str, ask: Callable[[], object], kind: type[Any]
    ) -> tuple[Any, str]:
        """What ``ask`` returns if it is a ``kind``, and why there is nothing."""
        try:
            said = ask()
            why_not = (
                "" if isinstance(said, kind) else f"it returns {said!r:.80}, no {kind.__name__}"
            )
        except Exception as error:  # noqa: BLE001 - foreign code that only shows
            said, why_not = None, f"{type(error).__name__}: {error}"
        if why_not and self._told.get((role.name, method)) != why_not:
            self._told[role.name, method] = why_not
            package = type(role).__module__.partition(".")[0]
            logger.warning(
                "role_cannot_be_shown role=%s method=%s: %s. The node goes on without it; the"
                " mistake is in the package %s",
                role.name, method, why_not, package,
            )  # fmt: skip
        return (None if why_not else said), why_not
