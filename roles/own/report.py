"""``shoal run report DIR -o FILE``: the page of a run as one file.

``DIR`` is a node's folder, or one that has folders of nodes (of `roles.own`, of a demo). A node
that runs is asked at its socket, and knows most. Of a trainer that does not run, the curves are
read from its metrics and its progress.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from p2p.errors import ConfigError
from p2p.node.dashboard.commands import read
from p2p.node.dashboard.core.picture import (
    Attendance,
    History,
    NodeView,
    SwarmView,
    draw,
    layout,
)
from p2p.node.dashboard.page import write_report
from p2p.node.folders import SOCKET, named_folder, node_of
from p2p.node.panels import load_panels
from p2p.node.usage import MAX_NAMED, check_target, complain, say, write_text
from roles.own.layout import TRAINER
from roles.trainer.curve import PROGRESS
from roles.trainer.metrics import METRICS, OLDER


def main(options: argparse.Namespace) -> int:
    """Write the report. Raises `ConfigError`."""
    folder = (named_folder(options) or node_of(options)).absolute()
    check_target("-o", options.out)
    found = list(_found(folder))
    if not found:
        raise ConfigError(f"{folder} has no node that runs, nor a trainer's curves")
    whole = merged(found)
    whole["picture"]["facts"].append(["made by", f"shoal run report {folder}"])
    write_text("-o", options.out, write_report(whole))
    say(f"the run as a page: {options.out}")
    return 0


def _found(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what each node says or has left, the trainer's first (`Snapshots.whole`)."""
    folders = [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]
    for place in sorted(folders, key=lambda path: not (path / METRICS).exists()):
        if (place / SOCKET).exists():
            with suppress(ConfigError):  # its socket was left by a kill, or it is stopped
                yield json.loads(trio.run(read, place, "/api/picture"))
                continue
        if (place / PROGRESS).exists():
            yield kept(place)


def kept(place: Path) -> dict[str, Any]:
    """Return what a trainer has left on disk. Raises `ConfigError`."""
    panels, history, name = load_panels([TRAINER]), History(), place.name
    try:
        # Behind its digest (`roles.shared.checked_json`), which nothing here is decided by.
        learnt = json.loads((place / PROGRESS).read_bytes().partition(b"\n")[2])
        wall = (place / PROGRESS).stat().st_mtime
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place / PROGRESS} cannot be read: {error}") from None
    rows = [row for file in (OLDER, METRICS) for row in _rows(place / file)]
    for row in rows:
        health = {"step": row.get("step"), "train_reward": row.get("reward"), "last_step": row}
        history.note_all(_view(name, health), panels)
    view = _view(name, {**learnt, "last_step": rows[-1] if rows else {}})
    history.note_all(view, panels)
    picture = draw(view, panels, Attendance(), 0.0)
    return {"picture": picture, "panels": layout(panels), "curves": history.curves(),
            "wall": wall, "at": 0}  # fmt: skip


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a trainer's metrics. One that a crash has cut off, or that is damaged,
    is left out with a warning: the other steps are as good as before. Raises `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    damaged = []
    for number, line in enumerate(text.splitlines(), 1):
        row = None
        with suppress(ValueError):
            row = json.loads(line)
        if isinstance(row, dict):
            yield row
        else:
            damaged.append(str(number))
    if damaged:
        more = f" and {len(damaged) - MAX_NAMED} more" if len(damaged) > MAX_NAMED else ""
        lines = ", ".join(damaged[:MAX_NAMED])
        complain(f"{path}: damaged, and left out: line {lines}{more}")


def _view(name: str, health: Mapping[str, Any]) -> SwarmView:
    step = health.get("step", 0)
    known = NodeView(health={"roles": {TRAINER: health}}, name=name, says=f"{step} steps")
    return SwarmView(title=f"Run of {name}", says=f"A trainer that has done {step} steps.",
                     known={name: known})  # fmt: skip


def merged(wholes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one page of what several nodes say. What a node says of itself counts before what
    others have heard of it."""
    first, *others = wholes
    if not others:
        return first
    picture = first["picture"]
    roles = " and ".join(picture["roles"]) or "relay"
    says = picture["says"].replace("This node", f"The {roles}", 1)
    picture |= {"says": f"{len(wholes)} nodes of this run. {says}", "own": ""}
    panels = {(one["role"], one["number"]): one for whole in wholes for one in whole["panels"]}
    for whole in others:
        more = whole["picture"]
        for peer, row in more["peers"].items():
            if peer not in picture["peers"] or row["state"] == "self":
                picture["peers"][peer] = row
        for role, nodes in more["roles"].items():
            picture["roles"].setdefault(role, {}).update(nodes)
        picture["flows"] = {**more["flows"], **picture["flows"]}
        first["curves"] |= whole["curves"]
    for row in picture["peers"].values():
        row["state"] = "known" if row["state"] == "self" else row["state"]
    return {**first, "panels": list(panels.values())}
