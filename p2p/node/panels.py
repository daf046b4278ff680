"""What a role shows of itself on the dashboard: panels, as data.

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
    """How a panel is drawn."""

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
    """One number or text of a health."""

    key: str
    """Where it stands in the role's health; dots lead into tables: ``last_step.loss``."""
    label: str
    unit: str = ""
    """``bytes``, ``seconds``, ``share`` (0 to 1) or a word to print behind the number."""
    about: str = ""
    """What it means, in a sentence."""
    counts: bool = False
    """Whether it only grows while a node lives: a counter in ``/metrics``."""
    lead: bool = False
    """Whether it stands at the top of the page: the few figures that people look for."""
    of: str = ""
    """Of a count: the key of how many there will be."""
    is_only_metric: bool = False
    """Whether it stands in ``/metrics`` and not on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A part of the page."""

    title: str
    kind: Kind
    values: tuple[Value, ...] = ()
    about: str = ""
    """What to make of it, in a sentence or two."""
    at: str = "step"
    """Of a curve: the key of what lies along the axis."""
    rows: str = ""
    """Of counts, a table and samples: the key of what has the entries."""
    names: str = "peer"
    """Of a table: what its rows are."""
    lead: bool = False
    """Whether it stands first and largest: what a run is for."""
    tasks: str = ""
    """Of a curve of shares: the key of how many tasks each was measured on, which gives its
    error."""


Panels = Mapping[str, tuple[Panel, ...]]
"""By the name of their role."""


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
