"""The picture that a page shows: what is known of a swarm, as one plain document.

A node draws itself, with the members that it has heard of; a demo draws all its nodes, whose
healths it has. Both are a `Scene`. The document::

    title, run: {name, id, epoch, owner}, own (our peer id, if the page is one node's)
    says            what is going on, in a sentence
    facts           [label, text] of the node itself
    peers           by id: name, roles, policy, load, upload, version, state, says, linked (to
                    this node), links (their number), since (seconds of the page's life)
    flows           by "from to": bytes of chunks
    roles           by role, by id, by the number of a panel: what `reading.read` gives

Tables are keyed, so that a change is small (`core.patch`); nothing in it is null.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from p2p.node.dashboard.core.history import History, Point
from p2p.node.dashboard.core.reading import Health, bounded_text, find, plain, read
from p2p.node.panels import Kind, Panel, Panels

MAX_PEERS: Final = 1_024
"""Peers of one picture, our own nodes first: 200 kB to a new viewer."""
MAX_KNOWN: Final = 32
"""Nodes of one picture whose health is known: those of a demo, or of a person's machines."""
MAX_GONE: Final = 32
"""Peers that have gone and are still shown."""
GONE_SECONDS: Final = 300.0
"""For how long: who looks at the page every few minutes sees who died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A node whose health is known."""

    health: Health
    name: str = ""
    """What its owner calls it."""
    says: str = ""
    """What it does, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that is known of a swarm at one moment."""

    title: str
    says: str
    run: Mapping[str, Any] = field(default_factory=dict)
    own: str = ""
    """The peer id of the node whose page it is; empty for a page of a swarm."""
    known: Mapping[str, Known] = field(default_factory=dict)
    """By peer id."""
    members: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What peers say of themselves, by id."""
    facts: Sequence[tuple[str, str]] = ()


class Roll:
    """Who was there lately, and since when: who has gone is still shown for a while."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._gone: dict[str, float] = {}
        self._since: dict[str, float] = {}
        """When each was first seen, of those who are there or are shown as gone."""

    def see(self, peers: Iterable[str], now: float) -> None:
        """These are there, whether somebody looks at the page or not."""
        kept = itertools.chain(peers, self._gone)
        self._since = {peer: self._since.get(peer, now) for peer in kept}

    def call(self, rows: dict[str, dict[str, Any]], now: float) -> dict[str, dict[str, Any]]:
        """``rows``, and those of peers that have gone."""
        for peer in self._rows:
            if peer not in rows:
                self._gone.setdefault(peer, now)
        for peer, since in list(self._gone.items()):
            is_over = now - since > GONE_SECONDS or len(self._gone) > MAX_GONE
            if peer in rows or is_over:
                del self._gone[peer]
        gone = {
            peer: {**self._rows[peer], "state": "gone"}
            for peer in self._gone
            if peer in self._rows
        }
        self.see(rows, now)
        self._rows = {
            peer: {**row, "since": round(self._since[peer])}
            for peer, row in {**rows, **gone}.items()
        }
        return self._rows


def draw(scene: Scene, panels: Panels, roll: Roll, now: float) -> dict[str, Any]:
    """The document of a scene."""
    known = dict(list(scene.known.items())[:MAX_KNOWN])
    rows = {peer: _known_row(one) for peer, one in known.items()}
    for peer, member in scene.members.items():
        if len(rows) >= MAX_PEERS:
            break
        rows[peer] = {**_member_row(member), **rows.get(peer, {})}
    if scene.own in rows:
        rows[scene.own]["state"] = "self"
    return {
        "title": bounded_text(scene.title),
        "says": bounded_text(scene.says),
        "own": scene.own,
        "run": {key: plain(value) for key, value in scene.run.items()},
        "facts": [[label, bounded_text(text)] for label, text in scene.facts],
        "peers": roll.call(rows, now),
        "flows": _flows(known),
        "roles": _roles(known, panels),
    }


def _known_row(one: Known) -> dict[str, Any]:
    health = one.health
    row = {
        "name": bounded_text(one.name),
        "says": bounded_text(one.says),
        "roles": [bounded_text(str(role)) for role in health.get("roles", {})],
        "policy": plain(find(health, "shardcast.newest")),
        "state": "known",
        "links": plain(health.get("connected")),
        "received": _sum_of(health, "from_peers", "from_origin"),
        "sent": _sum_of(health, "uploaded_as_origin", "uploaded_as_relay"),
    }
    return {key: value for key, value in row.items() if value is not None}


def _sum_of(health: Health, *names: str) -> int:
    sizes = (find(health, f"shardcast.{name}") for name in names)
    return sum(size for size in sizes if isinstance(size, int))


def _member_row(member: Mapping[str, Any]) -> dict[str, Any]:
    roles = [bounded_text(str(role)) for role in member.get("roles", ())]
    numbers = {key: plain(member.get(key)) for key in ("policy", "load", "upload", "version")}
    kept = {key: value for key, value in numbers.items() if value is not None}
    linked = {"linked": True} if member.get("linked") is True else {}
    return {"roles": roles, "state": "alive", **kept, **linked}


def _flows(known: Mapping[str, Known]) -> dict[str, int]:
    """Bytes by ``from to``. Both ends may have counted: what came is what counts."""
    flows: dict[str, int] = {}
    for peer, one in known.items():
        for other, size in (find(one.health, "flows.to") or {}).items():  # type: ignore[attr-defined]
            flows[f"{peer} {other}"] = size
    for peer, one in known.items():
        for other, size in (find(one.health, "flows.from") or {}).items():  # type: ignore[attr-defined]
            flows[f"{other} {peer}"] = size
    return flows


def _roles(known: Mapping[str, Known], panels: Panels) -> dict[str, Any]:
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


def note_curves(scene: Scene, panels: Panels, history: History) -> dict[str, list[Point]]:
    """Add the newest points of all curves to ``history``; what is new, by series."""
    fresh = {}
    for peer, one in list(scene.known.items())[:MAX_KNOWN]:
        for role, health in one.health.get("roles", {}).items():
            for number, panel in enumerate(panels.get(role, ())):
                for place, points in _curves_of(panel, health):
                    series = f"{role} {number} {place} {peer}"
                    added = history.note(series, points)
                    if added:
                        fresh[series] = added
    return fresh


def _curves_of(panel: Panel, health: Health) -> Iterator[tuple[int, list[Point]]]:
    """The points of each value of a curve: its newest, or, where the panel has ``rows``, those
    of the list there: tables, or lists of x and then a number for each value. Below x = 0 is
    what was before the first policy."""
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
    """What a page has to know of the panels to draw them."""
    return [
        {
            "role": role,
            "number": str(number),
            "title": panel.title,
            "kind": panel.kind.value,
            "about": panel.about,
            "at": panel.at,
            "values": [
                {
                    "label": one.label,
                    "unit": one.unit,
                    "about": one.about,
                    "lead": one.lead,
                    "counts": one.counts,
                }
                for one in panel.values
            ],
        }
        for role, ones in panels.items()
        for number, panel in enumerate(ones)
    ]
