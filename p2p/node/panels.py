"""Panels of roles on the dashboard, as data.

A package names its panels under the entry point group ``shoal.panels``, a tuple of `Panel` by
the name of the role whose health they read. The dashboard knows of no role: it takes from the
health what the panels name, and leaves out a panel of which nothing is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, cast

from p2p.errors import ConfigError
from p2p.node.entries import installed, load

PANELS: Final = "shoal.panels"


class Kind(Enum):
    """Kind of a panel."""

    FIGURES = "figures"
    """A number with its label for each value."""
    CURVE = "curve"
    """A curve for each value, over the panel's ``at``."""
    COUNTS = "counts"
    """A bar for each entry of the table ``rows``, with name and number."""
    TABLE = "table"
    """A row for each entry of the table ``rows``, with a column for each value."""
    SAMPLES = "samples"
    """Question, answer and reward for each entry of the list ``rows``. An entry may end with an
    earlier answer and its reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Number or text in a role's health."""

    key: str
    """Key in the role's health, with dots between nested keys, such as ``last_step.loss``."""
    label: str
    unit: str = ""
    """``bytes``, ``seconds``, ``share`` (0 to 1) or a word to print after the number."""
    about: str = ""
    """Explanation in a sentence."""
    counts: bool = False
    """True if the value only grows while a node runs, and so is a counter in ``/metrics``."""
    lead: bool = False
    """True if the value is shown at the top of the page, among the few that people look for."""
    of: str = ""
    """Key of the total, for counts."""
    is_only_metric: bool = False
    """True if the value is in ``/metrics`` but not on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Part of the page."""

    title: str
    kind: Kind
    values: tuple[Value, ...] = ()
    about: str = ""
    """Explanation in a sentence or two."""
    at: str = "step"
    """Key of the horizontal axis, for curves."""
    rows: str = ""
    """Key of the entries, for counts, tables and samples."""
    names: str = "peer"
    """Heading of the row names, for tables."""
    lead: bool = False
    """True if the panel comes first and largest, because it shows the purpose of a run."""
    tasks: str = ""
    """Key of the number of tasks, which determines the error; for curves of shares."""


Panels = Mapping[str, tuple[Panel, ...]]
"""Maps roles to their panels."""


def load_panels(roles: Iterable[str]) -> Panels:
    """Load the panels of these roles, which need not have any.

    Raises:
        ConfigError: Panels cannot be loaded, or have the wrong type.
    """
    points, found = installed(PANELS), dict[str, tuple[Panel, ...]]()
    for name in roles:
        if name not in points:
            continue
        point = points[name]
        panels = load(point.value, name, "panels")
        if not isinstance(panels, tuple) or not all(isinstance(one, Panel) for one in panels):
            raise ConfigError(f"the panels {name!r} are no tuple of Panel: {point.value}")
        found[name] = cast(tuple[Panel, ...], panels)
    return found
