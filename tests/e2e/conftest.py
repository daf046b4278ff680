"""Fixtures of several modules of tests/e2e."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.forked import Forks, forks


@pytest.fixture(scope="session")
def shells() -> Iterator[Forks]:
    """Command lines of ``shoal``, each in a process forked from one that has imported all."""
    with forks() as found:
        yield found
