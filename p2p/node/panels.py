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
    """A number with its label, for each value."""
    CURVE = "curve"
    """A line for each value, over the panel's ``at``."""
    COUNTS = "counts"
    """A bar for each entry of the table ``rows``: name and number."""
    TABLE = "table"
    """A line for each entry of the table ``rows``, a column for each value."""
    SAMPLES = "samples"
    """Question, answer and reward, for each entry of the list ``rows``; an entry may have an
    earlier answer and its reward behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A number or text of a health."""

    key: str
    """Key in the role's health; dots lead into tables: ``last_step.loss``."""
    label: str
    unit: str = ""
    """``bytes``, ``seconds``, ``share`` (0 to 1) or a word to print behind the number."""
    about: str = ""
    """Explanation in a sentence."""
    counts: bool = False
    """True if it only grows while a node lives: a counter in ``/metrics``."""
    lead: bool = False
    """True if it stands at the top of the page: the few figures that people look for."""
    of: str = ""
    """For counts: the key of their total."""
    is_only_metric: bool = False
    """True if it stands in ``/metrics`` and not on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A part of the page."""

    title: str
    kind: Kind
    values: tuple[Value, ...] = ()
    about: str = ""
    """Explanation in a sentence or two."""
    at: str = "step"
    """For curves: the key of the axis."""
    rows: str = ""
    """For counts, tables and samples: the key of the entries."""
    names: str = "peer"
    """For tables: the name of a row."""
    lead: bool = False
    """True if it stands first and largest: what a run is for."""
    tasks: str = ""
    """For curves of shares: the key of the number of tasks, which gives the error."""


Panels = Mapping[str, tuple[Panel, ...]]
"""Panels by role."""


def load_panels(roles: Iterable[str]) -> Panels:
    """The panels of these roles; a role need not have any. Raises `ConfigError`."""
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
