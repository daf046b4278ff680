"""How a node sees itself: the scene that its own page shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from p2p.errors import ConfigError
from p2p.host import Host, PeerEvent, PeerState
from p2p.node.dashboard.app import Orders
from p2p.node.dashboard.core.picture import Known, Scene
from p2p.node.node import Node
from p2p.node.rest import Rest
from p2p.node.role import Role
from p2p.node.share import ShareConfig
from p2p.swarm.core.limits import LOOPBACK, PRIVATE, reach_of
from p2p.wire import KI, MIB

PAUSE: Final = "/api/pause"
RESUME: Final = "/api/resume"


class Sight:
    """Looks at one node, from before it has a run until its end."""

    def __init__(self, host: Host, roles: Sequence[Role]) -> None:
        self._host = host
        self._roles = roles
        self._node: Node | None = None
        self._came = 0
        """How often others have dialled this node."""

    def note(self, event: PeerEvent) -> None:
        """Somebody has come, or gone."""
        if event.state is PeerState.CONNECTED and not event.dialled:
            self._came += 1

    def open(self, node: Node) -> None:
        """The node has joined its run."""
        self._node = node

    def unready(self) -> str:
        """Why the node cannot work yet; empty if it can."""
        if self._node is None:
            return "no run yet"
        return "" if self._node.shardcast.newest >= 0 else "no policy yet"

    @property
    def orders(self) -> Orders:
        """What the node's owner may tell it."""
        return {PAUSE: self._pause, RESUME: self._resume}

    async def _pause(self) -> str:
        await self._rest.pause()
        return "paused: roles finish what they have begun; the node goes on relaying"

    async def _resume(self) -> str:
        await self._rest.resume()
        why_not = self._rest.why_not
        return f"resumed; {why_not}" if why_not else "resumed"

    @property
    def _rest(self) -> Rest:
        if self._node is None:
            raise ConfigError("the node has no run yet: there is nothing to pause")
        return self._node.rest

    def scene(self) -> Scene:
        """What the node knows now."""
        own, node = str(self._host.peer_id), self._node
        if node is None:
            return Scene(
                title="Shoal", own=own, says="no run yet: asks the bootstrap peers for one",
                known={own: Known(health={"roles": {}})}, facts=self._addresses(),
            )  # fmt: skip
        run, health = node.run, node.health(self._roles)
        return Scene(
            title=run.name,
            says=in_words(health),
            run={"name": run.name, "id": run.id.hex(), "epoch": run.epoch,
                 "owner": str(run.owner)},
            own=own,
            known={own: Known(health=health, says=words_of(health))},
            members=self._members(node),
            facts=[
                *self._addresses(),
                ("clock", str(health["clock"])),
                ("connected", f"{health['connected']} peers"),
                ("run file", "in force" if node.book.in_force else "not in force yet"),
                *[fact for fact in (("rests", node.rest.why_not),
                                    ("lends", lent(node.config.share))) if fact[1]],
            ],
        )  # fmt: skip

    def _members(self, node: Node) -> dict[str, dict[str, object]]:
        """What peers say of themselves, this node among them."""
        linked = set(node.host.connected)
        found = {
            str(one.peer): {**_said(one.profile), "linked": one.peer in linked}
            for one in node.membership.members()
            if one.run in (b"", node.run.id)
        }
        return {str(node.peer_id): _said(node.membership.me.profile), **found}

    def _addresses(self) -> list[tuple[str, str]]:
        addrs = [str(addr) for addr in self._host.addrs]
        shown = [("address", addr) for addr in addrs] or [("address", "listens nowhere")]
        return [*shown, ("reachable", self._reachable())]

    def _reachable(self) -> str:
        """Whether others have dialled this node, which it can do without."""
        if not self._host.addrs:
            return "no, and it need not be: it dials others"
        best = max(map(reach_of, self._host.addrs))
        where = {LOOPBACK: "this machine", PRIVATE: "this network"}.get(best, "anywhere")
        came = (
            f"yes: dialled {self._came:,} times" if self._came else "nobody has dialled it yet"
        )
        return f"{came} (its address is for {where}); it dials others, too"


def lent(share: ShareConfig) -> str:
    """What ``[share]`` limits, for people; empty if nothing."""
    words = [
        f"{name} at most {rate / KI:,.0f} KiB/s"
        for name, rate in (("upload", share.upload), ("download", share.download))
        if rate
    ]
    words += [f"{share.disk / MIB:,.0f} MiB of disk"] if share.disk else []
    return "; ".join([*words, *([f"works {share.hours}"] if share.hours else [])])


def words_of(health: Mapping[str, Any]) -> str:
    """What a node's roles say that they do now; empty if they say nothing."""
    said = [role["now"] for role in health["roles"].values() if "now" in role]
    return "; ".join(one for one in said if isinstance(one, str))


def in_words(health: Mapping[str, Any]) -> str:
    """What a node does now: what its roles say of it, else that it relays."""
    said = [words] if (words := words_of(health)) else []
    newest = health["shardcast"]["newest"]
    holds = f"holds policy {newest}" if newest >= 0 else "holds no policy yet"
    work = "works as " + " and ".join(health["roles"]) if health["roles"] else "relays policies"
    if health.get("rests"):
        said = [f"paused ({health['rests']})", *said]
    now = f"This node: {'; '.join(said)}." if said else f"This node {work}."
    return f"{now} It {holds}, among {health['members'] + 1} peers."


def _said(profile: Any) -> dict[str, object]:
    """What a peer says of itself, as plain values."""
    return {
        "roles": list(profile.roles),
        "policy": profile.policy,
        "load": round(profile.load, 2),
        "upload": profile.upload,
        "version": profile.version,
    }
