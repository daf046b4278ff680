"""Snapshots for viewers: a whole one each second.

The node is looked at once a second, whoever watches: the curves need it. A picture is drawn and
encoded only while somebody watches, once for all viewers; twice a minute, and at the end, one
is kept in the node's folder, for a report of a stopped run and for the node's next life. A
viewer that reads slowly gets the newest snapshot when it reads again, so nothing piles up.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import trio

from p2p.concurrency import Notifier
from p2p.errors import ConfigError, LimitExceeded, StorageError
from p2p.host import Host, PeerEvent, PeerState
from p2p.node.dashboard.core.picture import (
    Attendance,
    History,
    NodeView,
    SwarmView,
    draw,
    layout,
)
from p2p.node.node import Node
from p2p.node.panels import Panels
from p2p.node.role import Role
from p2p.node.share import ShareConfig
from p2p.swarm.core.limits import LOOPBACK, PRIVATE, reach_of
from p2p.wire import KI, MIB
from p2p.world import World

logger = logging.getLogger(__name__)

MAX_VIEWERS: Final = 16  # at once: a household's screens
KEPT: Final = "page.json"  # in the node's folder: the newest snapshot


class Snapshots:
    """Draws pictures of a swarm from ``view`` for all viewers, while `run` runs."""

    def __init__(self, world: World, panels: Panels, view: Callable[[], SwarmView]) -> None:
        self.panels = panels
        self.view = view
        self.viewers = 0
        self._world = world
        self._began = world.now()
        self._history = History()
        self._seen = Attendance()
        self._drawn: dict[str, Any] = {}
        self._encoded: dict[bool, bytes] = {}  # with and without curves
        self._count = 0  # of pictures drawn for viewers
        self._told = Notifier()

    def whole(self) -> dict[str, Any]:
        """Return all that a page shows, which a static page embeds too."""
        return {**self._draw(), "curves": self._history.curves()}

    def _draw(self) -> dict[str, Any]:
        at = round(self._world.now() - self._began, 1)
        return {
            "picture": draw(self.view(), self.panels, self._seen, at),
            "panels": layout(self.panels),
            "wall": round(self._world.wall(), 1),
            "at": at,
        }

    async def _restore(self) -> None:
        try:
            kept = json.loads(await self._world.disk.read(KEPT))
            if as_json(kept["panels"]) == as_json(layout(self.panels)):
                self._history.restore(kept["curves"])
        except FileNotFoundError:
            return
        except (StorageError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.info("dashboard.kept_is_unreadable %r", error)

    async def _keep(self) -> None:
        try:
            await self._world.disk.replace(KEPT, as_json(self.whole()))
        except StorageError as error:
            logger.info("dashboard.not_kept %s", error)

    async def run(self, *, keeps: bool = False) -> None:
        """Update the curves and the viewers once a second, until cancelled. With ``keeps``,
        begin with the snapshot in the node's folder and keep the newest one there."""
        if keeps:
            await self._restore()
        due, is_blind = self._world.now(), False
        kept_at = due
        try:
            while True:
                try:
                    self.look()
                    if keeps and due >= kept_at + 30.0:
                        kept_at = due
                        await self._keep()
                    is_blind = False
                except (
                    Exception
                ):  # the border of what roles say: whoever only shows ends no work
                    if not is_blind:
                        logger.warning("dashboard.blind", exc_info=True)
                    is_blind = True
                due += 1.0
                await self._world.sleep_until(due)
        finally:
            if keeps:
                with trio.move_on_after(5, shield=True):
                    if not is_blind:
                        self.look()  # what came in the last second
                    await self._keep()

    def look(self) -> None:
        """Update the curves once, and draw a new picture if there are viewers."""
        view = self.view()
        self._history.note_all(view, self.panels)
        self._seen.see((*view.known, *view.members), self._world.now() - self._began)
        if self.viewers:
            self._tell()

    def _tell(self) -> None:
        self._drawn, self._encoded = self._draw(), {}
        self._count += 1
        self._told.notify_all()

    @contextmanager
    def viewing(self) -> Iterator[Callable[[], Awaitable[bytes]]]:
        """Open a page's view for the length of the block. Yield a function that waits for a new
        picture and returns it as a server-sent event, with the curves if they have changed.

        Raises:
            LimitExceeded: There are too many viewers.
        """
        if self.viewers >= MAX_VIEWERS:
            raise LimitExceeded(f"{MAX_VIEWERS} pages are open already: close one")
        seen, changes = 0, -1  # pictures, and changes of the curves, that this viewer has

        async def wait_picture() -> bytes:
            nonlocal seen, changes
            while self._count == seen:
                await self._told.wait()
            with_curves = self._history.changes != changes
            seen, changes = self._count, self._history.changes
            if with_curves not in self._encoded:
                curves = {"curves": self._history.curves()} if with_curves else {}
                event = b"data: %s\n\n" % as_json({**self._drawn, **curves})
                self._encoded[with_curves] = event
            return self._encoded[with_curves]

        self.viewers += 1
        try:
            self._tell()
            yield wait_picture
        finally:
            self.viewers -= 1


def as_json(value: object) -> bytes:
    """Return compact JSON, which contains no line ends."""
    return json.dumps(value, separators=(",", ":")).encode()


class OwnView:
    """View of one node, from before it has a run until its end."""

    def __init__(self, host: Host, roles: Sequence[Role]) -> None:
        self.node: Node | None = None
        """Node, once it has joined its run."""
        self._host = host
        self._roles = roles
        self._came = 0  # connections that others have dialled

    def note(self, event: PeerEvent) -> None:
        """Count connections that other peers have dialled."""
        if event.state is PeerState.CONNECTED and not event.dialled:
            self._came += 1

    def unready(self) -> str:
        """Return why the node cannot work yet; empty if it can."""
        if self.node is None:
            return "no run yet"
        return "" if self.node.shardcast.newest >= 0 else "no policy yet"

    async def pause(self) -> str:
        """Let roles begin no work, and return a sentence about it.

        Raises:
            ConfigError: The node has no run yet.
            StorageError: The pause could not be kept on disk.
        """
        await self._joined().rest.pause()
        return "paused: roles finish what they have begun; the node goes on relaying"

    async def resume(self) -> str:
        """Let roles work again, and return a sentence about it.

        Raises:
            ConfigError: The node has no run yet.
            StorageError: The pause could not be removed from disk.
        """
        rest = self._joined().rest
        await rest.resume()
        return f"resumed; {rest.why_not}" if rest.why_not else "resumed"

    def _joined(self) -> Node:
        if self.node is None:
            raise ConfigError("the node has no run yet: there is nothing to pause")
        return self.node

    def view(self) -> SwarmView:
        """Return the node's present state."""
        own, node = str(self._host.peer_id), self.node
        addrs = [("address", str(addr)) for addr in self._host.addrs]
        facts = [*(addrs or [("address", "listens nowhere")]), ("reachable", self._reachable())]
        if node is None:
            return SwarmView(
                title="Shoal", own=own, says="no run yet: waits for one",
                known={own: NodeView(health={"roles": {}})}, facts=facts,
            )  # fmt: skip
        run, health = node.run, node.health(self._roles)
        linked = set(node.host.connected)
        members = {
            str(one.peer): {
                **_said(one.profile),
                "linked": one.peer in linked,
                "path": node.nat.path(one.peer) if node.nat is not None else "",
            }
            for one in node.membership.members()
            if one.run in (b"", node.run.id)
        }
        facts += [
            ("clock", str(health["clock"])),
            ("connected", f"{health['connected']} peers"),
            ("run file", "in force" if node.book.in_force else "not in force yet"),
        ]
        facts += [("rests", node.rest.why_not)] if node.rest.why_not else []
        facts += [("lends", text)] if (text := lent(node.config.share)) else []
        return SwarmView(
            title=run.name,
            says=in_words(health),
            run={"name": run.name, "id": run.id.hex(), "epoch": run.epoch,
                 "owner": str(run.owner)},
            own=own,
            known={own: NodeView(health=health, says=words_of(health))},
            members={own: _said(node.membership.me.profile), **members},
            facts=facts,
            terms=run.words,
        )  # fmt: skip

    def _reachable(self) -> str:
        """Return a sentence on whether others have dialled this node."""
        if not self._host.addrs:
            return "no, and it need not be: it dials others"
        best = max(map(reach_of, self._host.addrs))
        where = {LOOPBACK: "this machine", PRIVATE: "this network"}.get(best, "anywhere")
        came = (
            f"yes: dialled {self._came:,} times" if self._came else "nobody has dialled it yet"
        )
        text = f"{came} (its address is for {where}); it dials others, too"
        nat = None if self.node is None else self.node.nat
        if nat is not None and nat.reachable:
            text = f"yes: {nat.reachable[0]} answers from outside"
        elif nat is not None and nat.relays:
            text = f"through {len(nat.relays)} relays; directly where routers allow"
        return text


def lent(share: ShareConfig) -> str:
    """Return the limits in ``[share]`` as text for people; empty if there are none."""
    words = [
        f"{name} at most {rate / KI:,.0f} KiB/s"
        for name, rate in (("upload", share.upload), ("download", share.download))
        if rate
    ]
    words += [f"{share.disk / MIB:,.0f} MiB of disk"] if share.disk else []
    return "; ".join([*words, *([f"works {share.hours}"] if share.hours else [])])


def words_of(health: Mapping[str, Any]) -> str:
    """Return the current activity of a node's roles in words; empty if they report none."""
    said = [role["now"] for role in health["roles"].values() if "now" in role]
    return "; ".join(one for one in said if isinstance(one, str))


def in_words(health: Mapping[str, Any]) -> str:
    """Return a node's current activity as text, from its roles or from its relaying."""
    said = [words] if (words := words_of(health)) else []
    newest = health["shardcast"]["newest"]
    holds = f"holds policy {newest}" if newest >= 0 else "holds no policy yet"
    work = "works as " + " and ".join(health["roles"]) if health["roles"] else "relays policies"
    if health.get("rests"):
        said = [f"paused ({health['rests']})", *said]
    now = f"This node: {'; '.join(said)}." if said else f"This node {work}."
    count = health["members"] + 1
    return f"{now} It {holds}, among {count} peer{'s' if count > 1 else ''}."


def _said(profile: Any) -> dict[str, object]:
    return {
        "roles": list(profile.roles),
        "policy": profile.policy,
        "load": round(profile.load, 2),
        "upload": profile.upload,
        "version": profile.version,
    }
