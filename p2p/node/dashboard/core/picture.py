"""The picture that a page shows: what is known of a swarm, as one plain document.

A node draws itself, with the members that it has heard of; a demo draws all its nodes, whose
healths it has. Both are a `SwarmView`. The document::

    title, run: {name, id, epoch, owner}, own (our peer id, if the page is one node's)
    says            what is going on, in a sentence
    facts           [label, text] of the node itself; terms: of its run
    peers           by id: name, roles, policy, load, upload, version, state, says, linked (to
                    this node), path (direct or relay), links (their number), since (seconds of
                    the page's life)
    flows           by "from to": bytes of chunks
    roles           by role, by id, by the number of a panel: what `read` gives

A health may hold what strangers said (a reason, an answer, a peer's name), and as much of it as
they liked. The page gets the first characters of a text and the largest rows of a table, so
what one status costs a viewer has a limit whatever the swarm does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from p2p.bounded import BoundedDict
from p2p.node.panels import Kind, Panel, Panels, Value

MAX_ROWS: Final = 40  # of one table; the largest come first

Health = Mapping[str, Any]
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """Node whose health is known."""

    health: Health
    name: str = ""
    """Name that its owner gave it."""
    says: str = ""
    """Current activity in a few words."""
    is_gone: bool = False
    """True if the node has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmView:
    """State of a swarm at one moment, as far as known."""

    title: str
    says: str
    run: Mapping[str, Any] = field(default_factory=dict)
    own: str = ""
    """Peer id of the node that the page shows; empty for a page of a swarm."""
    known: Mapping[str, NodeView] = field(default_factory=dict)
    """Maps peer ids to nodes whose health is known."""
    members: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Maps peer ids to the profiles in their heartbeats."""
    facts: Sequence[tuple[str, str]] = ()
    """Pairs of label and text about the node itself."""
    terms: Sequence[tuple[str, str]] = ()
    """Pairs of label and text about the run's purpose and recipe."""

    @property
    def shown(self) -> dict[str, NodeView]:
        """Known nodes in one picture: a demo's, or one person's."""
        return dict(itertools.islice(self.known.items(), 32))


class Attendance:
    """Records when each peer was first and last seen, so that a peer that has gone is shown for
    a while."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def see(self, peers: Iterable[str], now: float) -> None:
        """Note that ``peers`` are present, whether or not anyone looks at the page."""
        present = dict.fromkeys(peers)
        self._first = {peer: now for peer in present} | self._first
        gone = [peer for peer in self._last if peer not in present]
        # Who looks every few minutes sees who died.
        kept = [peer for peer in gone if now - self._last[peer] <= 300.0][-32:]
        self._last = {peer: self._last[peer] for peer in kept} | dict.fromkeys(present, now)
        self._first = {peer: self._first[peer] for peer in self._last}

    def complete(self, rows: dict[str, dict[str, Any]], now: float) -> dict[str, Any]:
        """Return ``rows`` and those of peers that have gone, each with the time at which it was
        first seen."""
        self.see(rows, now)
        gone = {
            peer: {**self._rows[peer], "state": "gone"}
            for peer in self._last
            if peer in self._rows and peer not in rows
        }
        self._rows = {
            peer: {**row, "since": round(self._first[peer])}
            for peer, row in {**rows, **gone}.items()
        }
        return self._rows


class Curve:
    """Curve in bounded memory.

    A full curve drops every other point, and from then on every other new one. So it shows the
    whole run at half the resolution. If the run goes back because a trainer loaded an older
    checkpoint, the curve drops the points ahead, which will be learnt again.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._newest: Point | None = None  # kept or not
        self._every = 1
        self._left_out = 0

    def note(self, points: Sequence[Point]) -> bool:
        """Add the points that are new and return True if any was kept. A last point that lies
        behind the newest begins the curve anew from there."""
        if self._newest is not None and points:
            if points[-1][0] > self._newest[0]:
                points = [point for point in points if point[0] > self._newest[0]]
            else:
                points = () if points[-1] == self._newest else points[-1:]
        return any([self._add(point) for point in points])

    def _add(self, point: Point) -> bool:
        points, self._newest = self.points, point
        while points and points[-1][0] >= point[0]:
            points.pop()
        self._left_out += 1
        if self._left_out < self._every and points:
            return False
        self._left_out = 0
        points.append(point)
        if len(points) > 512:  # as many as a phone has pixels across, twice over
            del points[1::2]
            self._every *= 2
        return True


class History:
    """All curves, by the names of their series."""

    def __init__(self) -> None:
        # Ten of each role in a demo of six nodes.
        self._curves: BoundedDict[str, Curve] = BoundedDict(64)
        self.changes = 0

    def note(self, series: str, points: Sequence[Point]) -> None:
        """Add the points that are new to the curve of ``series``."""
        curve = self._curves.get(series)
        if curve is None:
            curve = self._curves[series] = Curve()
        self.changes += curve.note(points)

    def note_all(self, view: SwarmView, panels: Panels) -> None:
        """Add the newest points of all curves of ``view``."""
        for peer, one in view.shown.items():
            for role, health in one.health.get("roles", {}).items():
                for number, panel in enumerate(panels.get(role, ())):
                    for place, points in _curves_of(panel, health):
                        self.note(f"{role} {number} {place} {peer}", points)

    def restore(self, curves: Mapping[str, Sequence[Point]]) -> None:
        """Add the curves that an earlier process of this node kept."""
        for series, points in curves.items():
            self.note(series, [(x, y) for x, y in points])

    def curves(self) -> dict[str, list[Point]]:
        """Return the points of all curves as plain values."""
        return {name: list(curve.points) for name, curve in self._curves.items()}


def draw(view: SwarmView, panels: Panels, seen: Attendance, now: float) -> dict[str, Any]:
    """Return the document of ``view`` for a page."""
    known = view.shown
    rows = {peer: _known_row(one) for peer, one in known.items()}
    for peer, member in view.members.items():
        if len(rows) >= 1024:  # 200 kB a second to a viewer
            break
        rows[peer] = {**_member_row(member), **rows.get(peer, {})}
    if view.own in rows:
        rows[view.own]["state"] = "self"
    return {
        "title": bounded_text(view.title),
        "says": bounded_text(view.says),
        "own": view.own,
        "run": {key: plain(value) for key, value in view.run.items()},
        "terms": [[label, bounded_text(text)] for label, text in view.terms],
        "facts": [[label, bounded_text(text)] for label, text in view.facts],
        "peers": seen.complete(rows, now),
        "flows": _flows(known),
        "roles": _roles(known, panels),
    }


def _known_row(one: NodeView) -> dict[str, Any]:
    health = one.health
    row = {
        "name": bounded_text(one.name),
        "says": bounded_text(one.says),
        "roles": [bounded_text(str(role)) for role in health.get("roles", {})],
        "policy": plain(find(health, "shardcast.newest")),
        "state": "gone" if one.is_gone else "known",
        "links": plain(health.get("connected")),
        "received": _sum_of(health, "received", "from_peers", "from_origin"),
        "sent": _sum_of(health, "sent", "uploaded_as_origin", "uploaded_as_relay"),
    }
    return {key: value for key, value in row.items() if value is not None}


def _sum_of(health: Health, own: str, *names: str) -> int:
    """Return the bytes of policies moved in one direction, and those that roles have moved."""
    sizes = [find(health, f"shardcast.{name}") for name in names]
    sizes += [role.get(own) for role in health.get("roles", {}).values()]
    return sum(size for size in sizes if isinstance(size, int))


def _member_row(member: Mapping[str, Any]) -> dict[str, Any]:
    roles = [bounded_text(str(role)) for role in member.get("roles", ())]
    numbers = {key: plain(member.get(key)) for key in ("policy", "load", "upload", "version")}
    kept = {key: value for key, value in numbers.items() if value is not None}
    linked = {"linked": True} if member.get("linked") is True else {}
    path = {"path": member["path"]} if member.get("path") else {}
    return {"roles": roles, "state": "alive", **kept, **linked, **path}


def _flows(known: Mapping[str, NodeView]) -> dict[str, int]:
    """Return the bytes moved, by ``from to``. If both ends have counted, the receiver's count
    is used."""
    flows: dict[str, int] = {}
    for way in ("to", "from"):
        for peer, one in known.items():
            moved: Mapping[str, int] = find(one.health, f"flows.{way}") or {}  # type: ignore[assignment]
            for other, size in moved.items():
                flows[f"{peer} {other}" if way == "to" else f"{other} {peer}"] = size
    return flows


def _roles(known: Mapping[str, NodeView], panels: Panels) -> dict[str, Any]:
    roles: dict[str, Any] = {}
    for peer, one in known.items():
        for role, health in one.health.get("roles", {}).items():
            shown = {
                str(number): value
                for number, panel in enumerate(panels.get(role, ()))
                if (value := read(panel, health)) is not None
            }
            if shown:
                roles.setdefault(role, {})[peer] = shown
    return roles


def _curves_of(panel: Panel, health: Health) -> Iterator[tuple[int, list[Point]]]:
    """Yield the points of each value of a curve panel.

    Without ``rows`` this is the newest point. With it, the points are those of the list there,
    whose items are tables, or lists of x and a number for each value. Points with x below 0,
    from before the first policy, are left out.
    """
    if panel.kind is not Kind.CURVE:
        return
    rows = find(health, panel.rows) if panel.rows else None
    for place, value in enumerate(panel.values):
        if isinstance(rows, list):
            pairs = [
                (find(row, panel.at), find(row, value.key))
                if isinstance(row, Mapping)
                else (row[0], row[place + 1])
                for row in rows
            ]
        else:
            pairs = [(find(health, panel.at), find(health, value.key))]
        points = [
            (x, y)
            for x, y in ((plain(x), plain(y)) for x, y in pairs)
            if isinstance(x, int | float) and isinstance(y, int | float) and x >= 0
        ]
        if points:
            yield place, points


def layout(panels: Panels) -> list[dict[str, Any]]:
    """Return the description of the panels that a page needs to draw them."""
    return [
        {**asdict(panel), "role": role, "number": str(number), "kind": panel.kind.value}
        for role, ones in panels.items()
        for number, panel in enumerate(ones)
    ]


def find(health: Health, key: str) -> object:
    """Return the value at ``key`` in nested tables, with dots between the parts; None if there
    is none."""
    found: object = health
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def plain(value: object) -> Any:
    """Return a finite number, a truth value or a bounded text; None for everything else."""
    match value:
        case bool() | int():
            return value if abs(value) < 2**53 else None  # beyond it JavaScript rounds
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
        case str():
            return bounded_text(value)
    return None


def bounded_text(text: str) -> str:
    """Return the beginning of ``text``, without broken characters that JSON cannot express."""
    # A question with its answer, as people read it.
    kept = text if len(text) <= 600 else text[:599] + "…"
    return kept.encode("utf-8", "replace").decode("utf-8")


def read(panel: Panel, health: Health) -> Any:
    """Return the values or rows that ``panel`` shows of ``health``, or None.

    For a curve this is the newest point; `History` has the whole curve.
    """
    match panel.kind:
        case Kind.FIGURES | Kind.CURVE:
            values = [_figure(value, health) for value in panel.values]
            tasks = [plain(find(health, panel.tasks))] if panel.tasks else []
            return None if all(value is None for value in values) else [*values, *tasks]
        case Kind.COUNTS:
            return _counts(find(health, panel.rows))
        case Kind.TABLE:
            return _table(panel, find(health, panel.rows))
        case Kind.SAMPLES:
            return _samples(find(health, panel.rows))


def _figure(value: Value, health: Health) -> Any:
    found, whole = plain(find(health, value.key)), find(health, value.of) if value.of else None
    if value.is_only_metric:
        return None
    if isinstance(found, int) and isinstance(whole, int) and whole:
        return f"{max(0, found):,} of {whole:,}"
    return found


def _counts(rows: object) -> list[list[Any]] | None:
    if not isinstance(rows, Mapping) or not rows:
        return None
    counts = [[bounded_text(str(name)), plain(count)] for name, count in rows.items()]
    counts = [row for row in counts if isinstance(row[1], int | float)]
    return sorted(counts, key=lambda row: (-row[1], row[0]))[:MAX_ROWS] or None


def _table(panel: Panel, rows: object) -> list[list[Any]] | None:
    if not isinstance(rows, Mapping) or not rows:
        return None
    lines = [
        [bounded_text(str(name)), *(_cell(find(row, value.key)) for value in panel.values)]
        for name, row in rows.items()
        if isinstance(row, Mapping)
    ]
    return sorted(lines, key=_size_of, reverse=True)[:MAX_ROWS] or None


def _cell(value: object) -> Any:
    """Return a value for a table cell. A table of counts becomes text with its most frequent
    entries."""
    counts = _counts(value)
    if counts is None:
        return plain(value)
    return bounded_text(", ".join(f"{count:,} × {name}" for name, count in counts))


def _size_of(line: Sequence[Any]) -> tuple[float, str]:
    numbers = [cell for cell in line[1:] if isinstance(cell, int | float)]
    return float(sum(numbers)), str(line[0])


def _samples(rows: object) -> list[list[Any]] | None:
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        return None
    # Questions with their answers of one role.
    samples = [
        [cell if isinstance(cell, int | float) else bounded_text(str(cell)) for cell in row]
        for row in rows[:10]
        if isinstance(row, Sequence) and len(row) in (3, 5)
    ]
    return samples or None
