"""A scenario: nodes, lines and faults in one TOML file, which every level runs.

```toml
caption = "Half of the nodes come and go; who is alive must stay known."
workload = "sim.workloads.churn:MembershipChurn"     # imported when the scenario runs
nodes = 50
duration = 300.0                           # virtual seconds

[link]                                     # see sim.net.link.LinkSpec
up = 50.0

[parameters]                               # the workload's own
lifetime = 120.0

[[expect]]
metric = "coverage"
at_least = 0.95
```
"""

from __future__ import annotations

import importlib
import math
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from p2p.errors import ConfigError
from p2p.node.usage import did_you_mean
from sim.faults.plan import KINDS, Fault, plan_from_table, plan_to_json
from sim.net.link import LinkSpec
from sim.node.swarm import Swarm

FOLDER: Final = Path(__file__).parent.parent / "scenarios"
FILE: Final = ".toml"
"""The ending of a scenario's path; names of scenarios that come with us do not have it."""
MAX_NODES: Final = 100_000
"""Ten times the largest scenario there is; more is a slip of the finger, and would fill
memory."""
LEAST_PHASE: Final = 2.0
"""Virtual seconds in which faults can be drawn: one begins a second before the end at the
latest."""


class Workload(Protocol):
    """Behaviour of the nodes of a scenario.

    A workload is a class without arguments. `run` adds its nodes to the swarm, lets the
    scenario's ``duration`` pass (``scenario.duration`` virtual seconds), and returns what it
    has measured. It reads its own settings with `Scenario.parameter`, which knows their types
    and defaults.
    """

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Play the scenario and return its metrics by name."""


@runtime_checkable
class Levelled(Protocol):
    """A workload that says on which levels it runs; others run at level 1."""

    levels: ClassVar[Sequence[int]]


@runtime_checkable
class Parametrised(Protocol):
    """A workload that names the ``[parameters]`` that it reads, so that a misspelt parameter is
    found before the run.

    In other workloads it is found at the end, as a parameter that was never read.
    """

    parameters: ClassVar[Sequence[str]]
    """Names, or patterns such as ``price_*``."""


class Parameters(Mapping[str, Any]):
    """The ``[parameters]`` of one run, and which of them the workload has asked for.

    A parameter that has no effect makes a wrong figure that looks right: ``--set lifetme=60``
    measures the default lifetime. Raises `ConfigError` for one that a `Parametrised` workload
    does not know, and for one that it reads without saying so.
    """

    def __init__(self, values: Mapping[str, Any], known: Sequence[str] | None) -> None:
        self._values = dict(values)
        self._known = known
        self._read: set[str] = set()
        if known is not None:
            for key in self._values:
                if not _matches(key, known):
                    raise ConfigError(
                        f"no parameter is called {key!r}; {did_you_mean(key, known)}"
                    )

    def __getitem__(self, key: str) -> Any:
        if self._known is not None and not _matches(key, self._known):
            raise ConfigError(
                f"the workload reads the parameter {key!r} and does not name it (parameters)"
            )
        self._read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        self._read.update(self._values)  # what walks over all may use any
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def check_read(self) -> None:
        """Check that every parameter was read.

        Raises:
            ConfigError: A parameter was not read. The message names the first.
        """
        for key in self._values:
            if self._known is None and key not in self._read:
                raise ConfigError(
                    f"the parameter {key!r} had no effect: the workload never asked for it; "
                    f"{did_you_mean(key, self._read, 'it asked for')}"
                )


def _matches(key: str, known: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A bound on one metric; breaking it fails the run."""

    metric: str

    at_least: float | None = None

    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ConfigError(f"an expectation of {self.metric} needs at_least or at_most")

    def judge(self, metrics: Mapping[str, float | int | str]) -> dict[str, object]:
        """Return the expectation and if it holds, for a result's JSON. A missing metric
        fails.
        """
        value = metrics.get(self.metric)
        limit = self.at_least if self.at_least is not None else self.at_most
        assert limit is not None
        number = value if isinstance(value, int | float) else float("nan")
        ok = number >= limit if self.at_least is not None else number <= limit
        sign = ">=" if self.at_least is not None else "<="
        return {
            "name": f"{self.metric} {sign} {limit:g}",
            "ok": bool(ok),
            "value": value,
            "limit": limit,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnFaults:
    """A safety phase in which faults drawn from the seed happen; a liveness phase follows
    it."""

    start: float = 30.0
    """Virtual second from which on things go wrong."""

    end: float = 120.0
    """Virtual second at which everything is whole again."""

    kinds: Sequence[str] | None = None
    """Which kinds may occur; all by default."""

    spare: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of nodes, by kind of fault, that it does not hit."""

    buggify: bool = True
    """True if `World.buggify` sites may misbehave too, from the beginning to ``end``."""

    def __post_init__(self) -> None:
        for kind in (*(self.kinds or ()), *self.spare):
            if kind not in KINDS:
                raise ConfigError(f"no fault is called {kind!r}; {did_you_mean(kind, KINDS)}")
        if not 0 <= self.start <= self.end - LEAST_PHASE:
            raise ConfigError(
                f"[draw] needs start >= 0 and end at least {LEAST_PHASE:g} s later"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Events of a simulation, with its number of nodes and its duration."""

    name: str

    caption: str
    """The question that the scenario answers, in one sentence."""

    workload: str
    """The class of the `Workload`, as ``module:Class``."""

    nodes: int = 50
    """Number of machines: enough that views are samples, few enough for seconds of CPU."""

    level: int = 1
    """The lowest level of the ladder that the workload runs on by default."""

    duration: float = 60.0
    """Virtual seconds the workload plays for."""

    horizon: float = 86_400.0
    """Virtual seconds after which the run is cut off in any case."""

    latency: float = 0.05
    """Seconds one way between any two machines, where no table says otherwise."""

    regions: bool = False
    """True if machines are spread over the regions of `sim.net.latency`, whose table then says
    how far apart."""

    link: LinkSpec = field(default_factory=LinkSpec)
    """Line of every machine, unless the workload draws its own."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the workload."""

    expect: Sequence[Expectation] = ()

    faults: Sequence[Fault] = ()
    """Faults of the scenario, with their times."""

    draw: DrawnFaults | None = None
    """Faults drawn from the seed, besides."""

    source: str = ""
    """Name of the scenario, or path of its file, beside which its workload may be. Not a key of
    the file."""

    def __post_init__(self) -> None:
        self._check_types()
        if not 1 <= self.nodes <= MAX_NODES:
            raise ConfigError(
                f"scenario {self.name}: nodes must be 1 to {MAX_NODES}, not {self.nodes}"
            )
        if not 0 < self.duration <= self.horizon:
            raise ConfigError(
                f"scenario {self.name}: duration must be positive and within the horizon"
            )

    def _check_types(self) -> None:
        for key in ("nodes", "level"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(
                    f"scenario {self.name}: {key} must be a whole number, not {value!r}"
                )
        for key in ("duration", "horizon", "latency"):
            value = getattr(self, key)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
            ):
                raise ConfigError(
                    f"scenario {self.name}: {key} must be a number, not {value!r}"
                )
        if self.latency < 0:
            raise ConfigError(f"scenario {self.name}: latency must not be negative")

    def parameter(self, key: str, default: float) -> float:
        """Return a number from ``[parameters]``, or ``default``.

        Raises:
            ConfigError: The parameter is no number.
        """
        value = self.parameters.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(
                f"scenario {self.name}: parameters.{key} must be a number, not {value!r}"
            )
        return value

    def open_workload(self) -> Workload:
        """Import the workload and return a new one.

        Raises:
            ConfigError: There is no such module or class.
        """
        module, _, name = self.workload.partition(":")
        if self.source.endswith(FILE):
            beside = str(Path(self.source).absolute().parent)
            if beside not in sys.path:
                sys.path.append(beside)  # last: a workload called json.py hides nothing
        try:
            workload: Workload = getattr(importlib.import_module(module), name)()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"scenario {self.name}: no workload {self.workload}: {error}"
            ) from error
        return workload

    def with_changes(self, **changes: Any) -> Scenario:
        """Return a copy with other fields; None leaves a field as it is."""
        return replace(
            self, **{key: value for key, value in changes.items() if value is not None}
        )


def place_of(name: str) -> Path:
    """Return the path of a file that a scenario names: as given, or beside the built-in
    scenarios.
    """
    return Path(name) if Path(name).exists() else FOLDER / name


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with the simulator."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_scenario(name_or_path: str) -> Scenario:
    """Return a scenario by name, or from a TOML file.

    Raises:
        ConfigError: A key is wrong. The message names it.
    """
    path = Path(name_or_path)
    if path.suffix != FILE:
        path = FOLDER / f"{name_or_path}{FILE}"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        near = did_you_mean(name_or_path, scenario_names())
        raise ConfigError(f"there is no scenario {name_or_path!r}; {near}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return replace(scenario_from_table(path.stem, table), source=name_or_path)


def scenario_from_table(name: str, table: Mapping[str, Any]) -> Scenario:
    """Return the scenario that a table describes.

    Raises:
        ConfigError: A key is unknown, missing or wrong. The message names it.
    """
    values = dict(table)
    try:
        if "link" in values:
            values["link"] = _build(LinkSpec, values["link"], f"scenario {name}, [link]")
        values["expect"] = tuple(
            _build(Expectation, entry, f"scenario {name}, [[expect]]")
            for entry in values.get("expect", ())
        )
        values["faults"] = plan_from_table(values.get("faults", ()))
        if "draw" in values:
            values["draw"] = _build(DrawnFaults, values["draw"], f"scenario {name}, [draw]")
        if not isinstance(values.get("parameters", {}), Mapping):
            raise ConfigError(f"scenario {name}: [parameters] must be a table")
        scenario: Scenario = _build(Scenario, {"name": name, **values}, f"scenario {name}")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"scenario {name}: {error}") from None
    return scenario


def scenario_to_table(scenario: Scenario) -> dict[str, Any]:
    """Return the table that `scenario_from_table` reads: all fields but name and origin."""
    table = asdict(scenario)
    del table["name"], table["source"]
    table["parameters"] = dict(scenario.parameters)
    table["expect"] = [
        {key: value for key, value in asdict(one).items() if value is not None}
        for one in scenario.expect
    ]
    table["faults"] = plan_to_json(scenario.faults)
    if scenario.draw is None:
        del table["draw"]
    return table


def _build(kind: type, table: object, where: str) -> Any:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table, not {table!r}")
    known = {item.name for item in fields(kind)} - {"source"}
    for key in table:
        if key not in known:
            raise ConfigError(
                f"{where}: unknown key {key!r}; {did_you_mean(key, known, 'known are')}"
            )
    try:
        return kind(**table)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None
