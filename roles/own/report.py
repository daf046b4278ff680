"""``shoal run report DIR [-o FILE]``: the page of a run as one file.

``DIR`` is a node's folder, or one that has folders of nodes (of `roles.own`, of a demo). A node
that runs is asked at its socket; one that does not has left its newest page in its folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from p2p.errors import ConfigError
from p2p.node.dashboard.commands import read
from p2p.node.dashboard.page import write_report
from p2p.node.dashboard.snapshots import KEPT
from p2p.node.folders import SOCKET, named_folder, node_of
from p2p.node.usage import check_target, complain, say, write_text

PARTS: Final = {"picture": dict, "panels": list, "curves": dict, "wall": float | int}


def main(options: argparse.Namespace) -> int:
    """Write the report.

    Raises:
        ConfigError: The folder has nothing to report.
    """
    folder = (named_folder(options) or node_of(options)).absolute()
    found = list(_found(folder))
    if not found:
        raise ConfigError(
            f"{folder} has no node that runs, nor one that has left its page ({KEPT})"
        )
    out = options.out or folder / "report.html"
    check_target("-o", out)
    try:
        whole = merged(found)
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"a page in {folder} is of another version: {error!r}") from None
    whole["picture"]["facts"] = [["made by", f"shoal run report {folder}"]]
    write_text("-o", out, write_report(whole))
    say(f"the run as a page: {out}")
    return 0


def _found(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield each node's page, live or as it was left on disk (`Snapshots.whole`), with its
    folder's name."""
    for place in (folder, *sorted(path for path in folder.glob("*") if path.is_dir())):
        whole = None
        if (place / SOCKET).exists():
            with suppress(ConfigError):  # its socket was left by a kill, or it is stopped
                whole = json.loads(read(place, "/api/picture"))
        is_live = whole is not None
        whole = whole or _kept(place / KEPT)
        if whole is None:
            continue
        own = whole["picture"]["peers"].get(whole["picture"]["own"], {})
        own["name"] = place.name
        if not is_live:
            own["says"] = f"stopped; it said last: {own.get('says') or 'nothing'}"
        yield {**whole, "is_live": is_live}


def _kept(path: Path) -> dict[str, Any] | None:
    try:
        whole = json.loads(path.read_bytes())
        if all(isinstance(whole[key], kind) for key, kind in PARTS.items()):
            return {"at": 0, **whole}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        complain(f"{path}: damaged, and left out: {error!r}")
    return None


def merged(wholes: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the pages of several nodes into one, a trainer's first. A node's own report counts
    before reports of others about it."""
    wholes.sort(key=lambda one: (not one["picture"]["roles"].get("trainer"), -one["wall"]))
    first, *others = wholes
    picture = first["picture"]
    panels = {(one["role"], one["number"]): one for whole in wholes for one in whole["panels"]}
    owners = {whole["picture"]["own"] for whole in wholes}
    for whole in others:
        more = whole["picture"]
        for peer, row in more["peers"].items():
            if peer not in picture["peers"] or peer == more["own"]:
                picture["peers"][peer] = row
        for role, nodes in more["roles"].items():
            picture["roles"].setdefault(role, {}).update(nodes)
        picture["flows"] = {**more["flows"], **picture["flows"]}
        first["curves"] |= whole["curves"]
    is_live = any(whole["is_live"] for whole in wholes)
    for peer, row in picture["peers"].items():
        row["state"] = "known" if peer in owners else row["state"]
    picture |= {"own": picture["own"] if not others else "", "says": _says(first, is_live)}
    return {**first, "panels": list(panels.values())}


def _says(whole: dict[str, Any], is_live: bool) -> str:
    """Return a sentence about the run's step and its rewards."""
    picture, gains, done = whole["picture"], list[str](), ""
    for panel in whole["panels"]:
        shown = picture["roles"].get(panel["role"], {})
        values = next(
            (one[panel["number"]] for one in shown.values() if panel["number"] in one), ()
        )
        for value, text in zip(panel["values"], values, strict=False):
            if value["of"] and isinstance(text, str) and not done:
                done = f"{value['label']} {text}"
        if panel["lead"]:
            series = f"{panel['role']} {panel['number']} 0 "
            curves = [one for name, one in whole["curves"].items() if name.startswith(series)]
            points: list[Any] = max(curves, key=len, default=[])
            if points:
                gains.append(f"{panel['title']} {points[0][1]:.3f} → {points[-1][1]:.3f}")
    state = "" if is_live else "; no node of it runs now"
    return ", ".join(gains[:1] + ([done] if done else [])) + state or picture["says"]
