"""Named nodes that run, die and come back, the cast of all scenarios.

A node is a machine (name, address, line, disk, clock, key) that lives several lives. Each life
is one task tree in a cancel scope of its own, with a fresh `SimWorld` over the same disk and
clock. What a node raises ends the simulation as `NodeFailed`, unless the swarm is told to count
it as a crash.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from types import TracebackType
from typing import Final

import trio

from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr
from sim.errors import NodeFailed
from sim.kernel.queue import SECOND, Owner
from sim.kernel.simulation import CURRENT_NODE, Simulation
from sim.kernel.virtual_time import hold_deadlines, release_deadlines
from sim.net.fabric import Cut, Fabric, Latency
from sim.net.latency import draw_region
from sim.net.link import LinkSpec
from sim.node.clock import MachineClock
from sim.node.disk import SimDisk
from sim.node.host import SimHost, open_sim_host
from sim.node.network import SimNetwork
from sim.node.world import SimWorld

logger = logging.getLogger(__name__)

NodeMain = Callable[["SimNode"], Awaitable[None]]
"""A node's main function for one life; it is cancelled when the node is killed."""
COLLECT_AFTER: Final = 64
"""Deaths, or an eighth of the nodes if that is more, between two rounds of the garbage
collector. A life that has ended is cycles of some 150 KiB, which it would leave for ever
(`sim.kernel.determinism.GC_THRESHOLDS`); a round over 1,000 nodes takes half a second."""


class SimNode:
    """One machine of a swarm."""

    def __init__(
        self, swarm: Swarm, name: str, main: NodeMain, *, link: LinkSpec, zone: str
    ) -> None:
        self.name = name
        self.zone = zone
        """Machines of one zone fail together."""
        self.main = main
        """Main function of the next life; may be replaced before `Swarm.restart`."""
        self.disk = SimDisk(name)
        self.clock = MachineClock(swarm.simulation.queue)
        self.life = 0
        self.died: float | None = None
        """Virtual second at which the current life ended."""
        self._swarm = swarm
        self.world = SimWorld(swarm.simulation, name, disk=self.disk, clock=self.clock)
        self.endpoint = swarm.fabric.add(name, self.world.owner, link, zone)
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._task: trio.lowlevel.Task | None = None

    @property
    def alive(self) -> bool:
        """True if one of its lives runs now."""
        return self.died is None

    @property
    def simulation(self) -> Simulation:
        """The simulation that all nodes share."""
        return self._swarm.simulation

    @property
    def siblings(self) -> list[SimNode]:
        """All nodes of the swarm, this one included, in the order in which they were added."""
        return list(self._swarm.nodes.values())

    @property
    def peer_id(self) -> PeerId:
        """The node's peer id, the same in every life."""
        return self.world.signer.peer_id

    @property
    def addr(self) -> Multiaddr:
        """The node's address, the same in every life."""
        return Multiaddr((("memory", str(self.endpoint.index)),)).with_peer(self.peer_id)

    @property
    def network(self) -> SimNetwork:
        """Raw byte streams, for code below a `Host` (level L2)."""
        return SimNetwork(self.world, self._swarm.fabric, self.endpoint)

    def open_host(self) -> AbstractAsyncContextManager[SimHost]:
        """Authenticated peers (level L1), for the length of the block."""
        return open_sim_host(self.world, self._swarm.fabric)

    def __repr__(self) -> str:
        return f"SimNode({self.name}, {'alive' if self.alive else 'dead'}, life {self.life})"

    async def run_life(self) -> None:
        """The task of one life."""
        ended = self._ended
        self._task = trio.lowlevel.current_task()
        CURRENT_NODE.set(self.name)
        with _Named(self._swarm, self), self._scope:
            await self.main(self)
        ended.set()

    def begin_life(self) -> None:
        """Make the world of the next life, which `Swarm.restart` runs."""
        self.life += 1
        self.died = None
        self.world = SimWorld(
            self._swarm.simulation, self.name, disk=self.disk, clock=self.clock, life=self.life
        )
        self._swarm.fabric.revive(self.endpoint, self.world.owner)
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._task = None

    def pause(self, until: int) -> None:
        """Stop the current life until a nanosecond, for `Swarm.pause`."""
        owner, queue = self.world.owner, self._swarm.simulation.queue
        longer = until - max(queue.now, owner.paused_until)
        if not self.alive or longer <= 0:
            return
        if owner.paused_until < queue.now:
            owner.paused_since = queue.now
        owner.paused_until = until
        self.world.prolong_blocking(longer)
        self._swarm.fabric.silence(self.endpoint)
        held = hold_deadlines(self._task, self._scope) if self._task is not None else []
        queue.schedule(until, queue.kernel, "resume", self._resume, owner, held)

    def _resume(self, owner: Owner, held: list[tuple[trio.CancelScope, float]]) -> None:
        queue, until = self._swarm.simulation.queue, owner.paused_until
        if owner.alive and until > queue.now:  # it was paused again meanwhile
            queue.schedule(until, queue.kernel, "resume", self._resume, owner, held)
        else:
            release_deadlines(held, queue.now / 1e9)

    def end_life(self, *, silent: bool, torn: Random | None) -> None:
        """End the current life, for `Swarm.kill`."""
        self.died = self._swarm.simulation.now
        self.world.owner.alive = False
        self._scope.cancel()
        self._swarm.fabric.kill(self.endpoint, silent=silent)
        self.disk.crash(torn)
        self.world.release_blocking()


class _Named:
    """Add the node's name to exceptions that leave it."""

    def __init__(self, swarm: Swarm, node: SimNode) -> None:
        self._swarm = swarm
        self._node = node
        self._owner = node.world.owner

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, NodeFailed):
            return False
        if not self._owner.alive:
            return True  # a killed node stumbles over its own end
        failure = NodeFailed(self._node.name, self._swarm.simulation.now, error)
        if self._swarm.strict:
            raise failure from error
        self._swarm.record_failure(failure)
        return True


class Swarm:
    """All nodes of a simulation. Open it with `open_swarm`."""

    def __init__(
        self,
        simulation: Simulation,
        nursery: trio.Nursery,
        latency: Latency | None,
        *,
        strict: bool,
    ) -> None:
        self.simulation = simulation
        self.fabric = Fabric(simulation, latency)
        self.nodes: dict[str, SimNode] = {}
        self.strict = strict
        self.failures: list[NodeFailed] = []
        """Errors that nodes raised, if the swarm is not strict."""
        self.on_death: list[Callable[[SimNode], None]] = []
        """Called just before a node dies, whatever kills it."""
        self.on_return: list[Callable[[SimNode], None]] = []
        """Called just before a node's next life."""
        self._nursery = nursery
        self._uncollected = 0
        self._world = SimWorld(simulation, "swarm")
        self._regions: Random | None = None

    @property
    def alive(self) -> list[SimNode]:
        """The nodes that run now, in the order in which they were added."""
        return [node for node in self.nodes.values() if node.alive]

    def draw_regions(self) -> None:
        """Put each machine that is added from now on in a region of the world, by weight."""
        self._regions = self.rng("regions")

    def rng(self, purpose: str) -> Random:
        """Return a generator for the scenario itself."""
        return self._world.rng(purpose)

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        await self._world.sleep(seconds)

    async def sleep_until(self, seconds: float) -> None:
        """Let time pass until so many virtual seconds after the start."""
        await self._world.sleep_until(seconds)

    def add(
        self, name: str, main: NodeMain, *, link: LinkSpec | None = None, zone: str = ""
    ) -> SimNode:
        """Add a machine and start its first life."""
        node = self.nodes[name] = SimNode(self, name, main, link=link or LinkSpec(), zone=zone)
        if self._regions is not None:
            node.endpoint.region = draw_region(self._regions)
        self._start(node)
        return node

    def _start(self, node: SimNode) -> None:
        self.simulation.lives.setdefault(node.name, []).append([round(self.simulation.now, 3)])
        self._nursery.start_soon(node.run_life, name=node.name)

    def kill(self, name: str, *, silent: bool = False, torn: bool = False) -> None:
        """End a node at once: tasks, wires, unsynced writes. Nothing of it runs any more.

        ``silent`` takes the whole machine away, so that peers are not even told; ``torn`` lets
        a random part of the unsynced writes survive.
        """
        node = self.nodes[name]
        if node.alive:
            for listener in self.on_death:
                listener(node)
            dice = self.simulation.rng(name, f"torn/{node.life}") if torn else None
            node.end_life(silent=silent, torn=dice)
            self.simulation.lives[name][-1].append(round(self.simulation.now, 3))
            self._uncollected += 1
            if self._uncollected >= max(COLLECT_AFTER, len(self.nodes) // 8):
                self._uncollected = 0
                gc.collect()

    def restart(self, name: str, *, wipe: bool = False) -> SimNode:
        """Begin a new life on the last life's disk, or on an empty disk. Kills a life that
        still runs."""
        self.kill(name)
        node = self.nodes[name]
        if wipe:
            node.disk.wipe()
        for listener in self.on_return:
            listener(node)
        node.begin_life()
        self._start(node)
        return node

    def record_failure(self, failure: NodeFailed) -> None:
        """Record that a node crashed; the swarm goes on without it."""
        logger.info("a node crashed: %s", failure)
        self.failures.append(failure)
        self.kill(failure.node)

    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back each so many virtual seconds, as long as the swarm is open: invariants,
        curves."""
        queue = self.simulation.queue

        def again() -> None:
            callback()
            queue.schedule(queue.now + int(seconds * SECOND), self._world.owner, "watch", again)

        queue.schedule(queue.now + int(seconds * SECOND), self._world.owner, "watch", again)

    def end_watches(self) -> None:
        """Stop the calls that `every` made."""
        self._world.owner.alive = False

    # The network between them.

    def partition(self, *groups: Iterable[str], one_way: bool = False) -> list[Cut]:
        """Cut the groups off from each other; with ``one_way``, only the first group's
        sending."""
        sides = [list(group) for group in groups]
        pairs = [(one, other) for one in sides for other in sides if one is not other]
        if one_way:
            pairs = [(one, other) for one, other in pairs if one is sides[0]]
        return [self.fabric.cut(one, other) for one, other in pairs]

    def hold(self, one: str, other: str) -> list[Cut]:
        """Keep everything between two nodes back until it is released; connections survive."""
        return [
            self.fabric.cut([one], [other], breaks=False),
            self.fabric.cut([other], [one], breaks=False),
        ]

    def repair(self, cuts: Iterable[Cut] | None = None) -> None:
        """End these partitions and holds, or all."""
        for cut in list(cuts if cuts is not None else self.fabric.cuts):
            self.fabric.repair(cut)

    release = repair

    def pause(self, name: str, seconds: float) -> None:
        """Stop the process of a node for a while, as SIGSTOP and SIGCONT do, or a long swap.

        Its clocks go on. Afterwards whatever is due by them happens first, timers and deadlines
        alike, and only then does it see what its kernel has taken in meanwhile. Threads have
        stood still, too. Peers whose dials it leaves unanswered, or who hear nothing from it
        for as long as a connection may be silent, give it up.
        """
        self.nodes[name].pause(self.simulation.queue.now + int(seconds * SECOND))


@asynccontextmanager
async def open_swarm(
    simulation: Simulation, latency: Latency | None = None, *, strict: bool = True
) -> AsyncIterator[Swarm]:
    """Open a swarm for the length of the block. At its end all nodes are cancelled (not
    killed).

    With ``strict`` an exception in a node ends the simulation; without, it counts as a crash.
    """
    async with trio.open_nursery() as nursery:
        swarm = Swarm(simulation, nursery, latency, strict=strict)
        yield swarm
        swarm.end_watches()
        nursery.cancel_scope.cancel()
