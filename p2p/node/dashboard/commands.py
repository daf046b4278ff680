"""``shoal status``, ``peers``, ``top``, ``pause`` and ``resume``: a node's own socket, asked
from a shell."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from p2p.errors import ConfigError
from p2p.naming import printable
from p2p.node.folders import (
    SOCKET,
    add_folder,
    listed,
    named_folder,
    node_of,
    nodes_of,
    why_silent,
)
from p2p.node.usage import FAILED, CommandParser, complain, interruptible, patience, say
from p2p.wire import MIB

ASK_SECONDS: Final = 10.0
"""Seconds that a node may be silent. It sends a picture each second, on a machine that may be
busy; a stopped node (SIGSTOP) would never answer."""

Notes = Callable[[Path], list[tuple[str, str]]]
"""Returns facts that a node's folder shows and the node cannot know, each with its label."""


def status_main(argv: Sequence[str], notes: Notes = lambda _: []) -> int:
    """Say what the node in a folder does now."""
    return _run("status", status_main.__doc__, argv, partial(_status, notes))


def peers_main(argv: Sequence[str]) -> int:
    """List the peers that the node in a folder knows."""
    return _run("peers", peers_main.__doc__, argv, _peers)


def top_main(argv: Sequence[str]) -> int:
    """Show what the node in a folder does, each second, until Ctrl-C."""
    return _run("top", top_main.__doc__, argv, _top)


def pause_main(argv: Sequence[str]) -> int:
    """Let the node in a folder begin no work; it goes on relaying."""
    return _run("pause", pause_main.__doc__, argv, partial(_order, "/api/pause"))


def resume_main(argv: Sequence[str]) -> int:
    """Let the node in a folder work again."""
    return _run("resume", resume_main.__doc__, argv, partial(_order, "/api/resume"))


def _run(
    name: str, text: str | None, argv: Sequence[str], main: Callable[[argparse.Namespace], None]
) -> int:
    parser = CommandParser(prog=f"shoal {name}", description=text)
    add_folder(parser)
    if name not in ("pause", "resume"):
        parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(argv)
    return interruptible(partial(_ask, options, main))


def _ask(options: argparse.Namespace, main: Callable[[argparse.Namespace], None]) -> int:
    nodes_of(options)  # a wrong command line, and not a node that is silent
    try:
        main(options)
    except ConfigError as error:
        complain(error)
        return FAILED
    return 0


def _order(path: str, options: argparse.Namespace) -> None:
    nodes = nodes_of(options)
    if len(nodes) > 1 and named_folder(options) is None:
        raise ConfigError(
            f"{len(nodes)} nodes of yours run: name one, or the folder of a run, of"
            f" {listed(nodes)}"
        )
    for folder in nodes:
        answer = read(folder, path, "POST").decode().strip()
        say(f"{folder}: {answer}" if len(nodes) > 1 else answer)


def _status(notes: Notes, options: argparse.Namespace) -> None:
    folder, *others = nodes_of(options)
    whole = json.loads(read(folder, "/api/picture"))
    whole["picture"]["facts"] += [*notes(folder), ("folder", str(folder.absolute()))]
    say(json.dumps(whole["picture"]) if options.json else describe(whole))
    for other in () if options.json else others:
        says = json.loads(read(other, "/api/picture"))["picture"]["says"]
        say(f"\n{other}\n{printable(says)}")


def _peers(options: argparse.Namespace) -> None:
    peers = json.loads(read(node_of(options), "/api/picture"))["picture"]["peers"]
    say(json.dumps(peers) if options.json else "\n".join(peer_lines(peers)))


def _top(options: argparse.Namespace) -> None:
    whole: dict[str, Any] = {}
    with suppress(KeyboardInterrupt):
        for told in following(node_of(options)):
            whole |= told  # curves come when they have changed
            if options.json:
                say(json.dumps(whole["picture"]))
            elif sys.stdout.isatty():  # ECMA-48, CUP and ED: from the first line, and the rest
                columns, lines = shutil.get_terminal_size()
                kept = [
                    line[: columns - 1] for line in describe(whole).split("\n")[: lines - 1]
                ]
                say("\x1b[H" + "\n".join(line + "\x1b[K" for line in kept) + "\x1b[J")
            else:
                say(describe(whole))


def describe(whole: Mapping[str, Any]) -> str:
    """Return a picture as text for a terminal: the run and its progress, this node's work, then
    the rest."""
    picture = whole["picture"]
    head = [printable(picture["title"]), printable(picture["says"])]
    lines, seen = list[str](), set[str]()
    for panel in whole["panels"]:
        role, number = panel["role"], panel["number"]
        shown = picture["roles"].get(role, {}).get(picture["own"], {})
        values = shown.get(number)
        points = whole["curves"].get(f"{role} {number} 0 {picture['own']}", [])
        if panel.get("lead") and points:  # a node that still runs may be of an older version
            gain = f"{points[0][1]:.3f} -> {points[-1][1]:.3f}"
            head.append(f"{panel['title']}  {gain}  {_bars([y for _, y in points])}")
        if panel["kind"] != "figures" or not values:
            continue
        told = [
            f"  {written(value, one['unit']):>14}  {one['label']}"
            for one, value in zip(panel["values"], values, strict=True)
            if value not in (None, 0) and one["label"] not in seen
        ]
        seen |= {one["label"] for one in panel["values"] if one.get("of")}
        lines += ["", panel["title"], *told] if told else []
    terms = dict(picture.get("terms", ()))
    if learns := terms.pop("learns", ""):
        head.insert(1, printable(learns))
    facts = [*terms.items(), *picture["facts"]]
    return "\n".join([*head, *lines, ""] + [f"{name:<12}{printable(it)}" for name, it in facts])


def _bars(values: Sequence[float]) -> str:
    """Return the newest numbers as bars, scaled from the least to the greatest number."""
    low, high = min(values), max(values)
    # points of a curve that a line has room for
    shares = [(value - low) / (high - low) if high > low else 0 for value in values[-24:]]
    return "".join("▁▂▃▄▅▆▇█"[round(7 * share)] for share in shares)


def written(value: object, unit: str) -> str:
    """Return a number with its unit, as on the page."""
    if isinstance(value, str | bool):
        return printable(str(value))
    if not isinstance(value, int | float):
        return "-"
    if unit == "share":
        return f"{100 * value:.3g} %"
    if unit == "bytes":
        power = next((p for p in (4, 3, 2, 1) if value >= 1000**p), 0)
        return f"{value / 1000**power:,.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
    places = 0 if isinstance(value, int) or value >= 100 else 1 if value >= 10 else 3
    text = f"{value:,.{places}f}"
    return f"{text} {unit}".rstrip().replace(" seconds", " s")


def peer_lines(peers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each peer, the newest policy first."""
    order = sorted(peers.items(), key=lambda item: (-int(item[1].get("policy", -1)), item[0]))
    lines = [f"{'peer':<54}{'roles':<22}{'policy':>7}  state"]
    for peer, row in order:
        roles = printable(", ".join(row["roles"]) or "none")
        path = {"direct": ", direct", "relay": ", through a relay"}.get(row.get("path", ""), "")
        policy = row["policy"] if row.get("policy", -1) >= 0 else "-"
        lines.append(f"{peer:<54}{roles:<22}{policy:>7}  {row['state']}{path}")
    return lines


def read(folder: Path, path: str, method: str = "GET") -> bytes:
    """Return the whole body of a node's answer.

    Raises:
        ConfigError: The node does not answer, or refuses.
    """
    with _asking(folder, path, method) as answer:
        return answer.read()


def following(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a node's snapshots as they come, until it ends.

    Raises:
        ConfigError: The node does not answer, or refuses.
    """
    # Bytes of one event: twice the whole picture of 1,000 peers that say all they may.
    with _asking(folder, "/api/events", "GET") as answer:
        while line := answer.readline(8 * MIB):
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


@contextmanager
def _asking(folder: Path, path: str, method: str) -> Iterator[http.client.HTTPResponse]:
    """Send a request to the node in ``folder`` and yield its answer.

    Raises:
        ConfigError: The node does not answer, or refuses.
    """
    where = folder / SOCKET
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(ASK_SECONDS)
    try:
        with patience(f"waits for the node at {where}"):
            _reach(connection.sock, folder)
            connection.request(method, path)
            answer = connection.getresponse()
        if answer.status == 409:  # with a sentence for people
            raise ConfigError(answer.read().decode("utf-8", "replace").strip())
        if answer.status != 200:
            raise ConfigError(f"the node at {where} answers {answer.status}")
        yield answer
    except TimeoutError:
        raise ConfigError(
            f"the node at {where} has said nothing for {ASK_SECONDS:g} s: it is stopped (kill"
            " -CONT lets it go on), or its machine is very busy"
        ) from None
    except (http.client.HTTPException, ConnectionError) as error:
        raise ConfigError(f"the node at {where} broke off: {error}") from None
    finally:
        connection.close()


def _reach(to_node: socket.socket, folder: Path) -> None:
    where = folder / SOCKET
    try:
        to_node.connect(os.fsencode(where))
    except TimeoutError:
        raise
    except (OSError, ValueError) as error:
        refused = isinstance(error, FileNotFoundError | ConnectionRefusedError)
        why = why_silent(folder) if refused else f"no node answers at {where}: {error}"
        raise ConfigError(why) from None
