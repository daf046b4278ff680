"""Members of a DiLoCo run that come, die, return and lie, with pretended inner steps. (L1)

Real sessions on simulated hosts, links and disks; only the model is pretended. The first
``founders`` nodes found the run, the others join at ``join_at`` seconds. Of the founders the
last ``hostile`` are hostile in one way each, from ``way`` on: pieces that are NaN, an update a
thousand times too large, sums that are none, another vote for every second peer, an update
that undoes a third of what the others learn. Faults come from the scenario. With ``parallel``
members average gradients instead (`roles.diloco.core.outer`); with ``fragments`` a round
exchanges one part of the model. Replicas must have one state at each step, whatever happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np

from p2p.identity import PeerId
from p2p.world import World
from roles.contract.core.diloco import Codec, DilocoTerms, Outer
from roles.diloco.config import DilocoConfig
from roles.diloco.core import events as ev
from roles.diloco.core.messages import NO_DIGEST, Ready, Record, Sum, Vote
from roles.diloco.core.pieces import digest_of, total_norm, usual_norm
from roles.diloco.core.quant import Values
from roles.diloco.core.round import shares_of
from roles.diloco.exchange import Blob, PieceServer, Read
from roles.diloco.inner import Phase
from roles.diloco.session import DilocoSession
from roles.engines.config import DeviceProfile, EngineConfig
from sim.node.swarm import SimNode, Swarm
from sim.run.scenario import Scenario
from sim.workloads.inner import FakeInner
from sim.workloads.supervision import supervise

RUN: Final = b"simulated pre-training run, 32 b"
WAYS: Final = 5
"""Number of hostile behaviours."""
BOUNDED: Final = (1, 4)
"""Ways that no evidence convicts: the clipped norm bounds what they do."""
LOOK: Final = 1.0
"""Virtual seconds between looks at the swarm."""


def nan(piece: bytes) -> bytes:
    """Return the piece with NaN as its first scale."""
    return b"\xc0\x7f" + piece[2:]


class NanBlob(Blob):
    """An update whose first piece differs from what is on disk."""

    async def read(self, index: int) -> bytes:
        piece = await self.file.read(index)
        return piece if index else nan(piece)


class NanServer(PieceServer):
    """Serves pieces that its own sums do not use."""

    def __init__(self, world: World, may: Callable[[PeerId], bool]) -> None:
        super().__init__(world, may)
        self.honest: dict[bytes, Blob] = {}

    def holds(self, root: bytes) -> Blob | None:
        """Bytes that this node itself reads."""
        return self.honest.get(root) or super().holds(root)


class NanSession(DilocoSession):
    """Contributes a piece whose first scale is NaN."""

    async def _encode(self, record: Record, tokens: int) -> Ready:
        ready = await super()._encode(record, tokens)
        blob = self.server.holds(self._update_root)
        assert blob is not None
        first = nan(await blob.read(0))
        digests = (digest_of(first), *ready.digests[1:])
        self._update_root = self.server.offer(NanBlob(digests, blob.file))
        assert isinstance(self.server, NanServer)
        self.server.honest[self._update_root] = blob
        return replace(ready, digests=digests)


class ThousandfoldInner(FakeInner):
    """Sends updates a thousand times as large as computed."""

    def update(self) -> Values:
        return np.float32(1000) * super().update()


class HarmfulInner(FakeInner):
    """Sends updates in the wrong direction, smaller than the others' in the right one."""

    def update(self) -> Values:
        return np.float32(-0.3) * super().update()


class TwoStories(DilocoSession):
    """Votes for its result, and tells every second peer something else."""

    async def _carry_out(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Send) and isinstance(effect.message, Vote):
            vote = effect.message
            if self._beginning.members.index(effect.peer) % 2:
                lie = replace(vote, outcome=replace(vote.outcome, sum_root=NO_DIGEST))
                effect = ev.Send(effect.peer, lie.signed(self.history, self._world.signer))
        await super()._carry_out(effect)


class LyingServer(PieceServer):
    """Serves invalid sums, correctly signed."""

    history: bytes
    """The history that the session's signatures are bound to."""

    def offer_pieces(self, step: int, view: int, read: Read, span: range) -> None:
        """Offer pieces only after the lie is complete."""

    async def offer_sum(self, total: Sum, read: Read) -> None:
        """Offer an honest sum, but for the last byte of each piece."""

        async def wrong(index: int) -> bytes:
            piece = await read(index)
            return piece[:-1] + bytes((piece[-1] ^ 0x11,))

        digests = [digest_of(await wrong(one)) for one in total.span]
        lie = replace(total, digests=tuple(digests))
        await super().offer_sum(lie.signed(self.history, self._world.signer), wrong)


class Pretraining:
    """Founders, joiners and liars of one run."""

    parameters: ClassVar[Sequence[str]] = (
        "founders",
        "join_at",
        "rounds",
        "hostile",
        "way",
        "overlap",
        "fragments",
        "parallel",
    )

    strangers: ClassVar[Sequence[str]] = ()
    """Sites that have another run file."""

    def __init__(self) -> None:
        self._sessions: dict[str, DilocoSession] = {}
        self._states: dict[int, dict[str, bytes]] = {}
        self._members: dict[int, int] = {}
        self._named: dict[tuple[str, PeerId], int] = {}
        self._moved = 0.0
        self._trained: dict[str, Counter[int]] = {}
        """Count of each site's learning from each batch."""
        self._terms = DilocoTerms()
        self._profile = DeviceProfile()
        self._founders: list[PeerId] = []
        self._peers: list[PeerId] = []
        self._hostile: dict[str, int] = {}

    async def run(self, swarm: Swarm, scenario: Scenario) -> Mapping[str, float | int | str]:
        """Play until all hold the last round, or the duration is over."""
        founders = int(scenario.parameter("founders", 4))
        hostile = int(scenario.parameter("hostile", 0))
        names = [f"site-{number}" for number in range(scenario.nodes)]
        signer = swarm.simulation.keys.signer
        self._peers = [signer(name).peer_id for name in names]
        self._founders = self._peers[:founders]
        self._hostile = {
            name: number % WAYS
            for number, name in enumerate(
                names[founders - hostile : founders], int(scenario.parameter("way", 0))
            )
        }
        self._terms = self._make_terms(scenario)
        self._profile = DeviceProfile(step_seconds=10.0 / self._terms.inner_steps)
        for name in names[:founders]:
            swarm.add(name, self._live, link=scenario.link)
        swarm.every(LOOK, self._look)
        await swarm.sleep_until(scenario.parameter("join_at", 30.0))
        for name in names[founders:]:
            swarm.add(name, self._live, link=scenario.link)
        while swarm.simulation.now < scenario.duration and not self._is_over(swarm):
            await swarm.sleep(LOOK)
        return self._measure(swarm)

    def _make_terms(self, scenario: Scenario) -> DilocoTerms:
        """Return the terms of the run. A round of data parallel is one step and takes as long
        as a hundred."""
        terms = DilocoTerms(
            outer_steps=int(scenario.parameter("rounds", 12)),
            inner_steps=100,
            codec=Codec.INT8,
            overlap=bool(scenario.parameter("overlap", 0)),
            fragments=int(scenario.parameter("fragments", 1)),
            grace=10.0,
            patience=30.0,
        )
        if not scenario.parameter("parallel", 0):
            return terms
        return replace(terms, outer=Outer.PARALLEL, inner_steps=1)

    async def _live(self, machine: SimNode) -> None:
        await supervise(machine, self._process)

    async def _process(self, machine: SimNode) -> None:
        way = self._hostile.get(machine.name)
        inner = {1: ThousandfoldInner, 4: HarmfulInner}.get(way or 0, FakeInner)
        engine = inner(
            machine.world, EngineConfig(kind="fake", profile=self._profile), self._terms
        )
        self._count_batches(machine.name, engine)
        kind = {0: NanSession, 3: TwoStories}.get(-1 if way is None else way, DilocoSession)
        may_train = frozenset(self._peers).__contains__
        async with machine.open_host() as host:
            for other in machine.siblings:
                host.add_addrs(other.peer_id, [other.addr])
            session = kind(
                machine.world,
                host,
                bytes(len(RUN)) if machine.name in self.strangers else RUN,
                self._terms,
                DilocoConfig(),
                engine,
                self._founders,
                may_train,
            )
            liar: Any = {0: NanServer, 2: LyingServer}.get(-1 if way is None else way)
            if liar is not None:
                session.server = server = liar(machine.world, may_train)
                server.history = session.history
            self._sessions[machine.name] = session
            await session.work_forever()

    def _count_batches(self, name: str, engine: FakeInner) -> None:
        """Count the batches that are learnt from twice: those that a killed site had lost."""
        train, counts = engine.train, self._trained.setdefault(name, Counter())
        sequences = self._terms.sequences

        async def counted(first: int, steps: int, window: int) -> Phase:
            phase = await train(first, steps, window)
            counts.update(range(window, window + steps * sequences, sequences))
            return phase

        engine.train = counted  # type: ignore[method-assign]

    def _look(self) -> None:
        for name, session in self._sessions.items():
            if not hasattr(session, "core"):
                continue
            for record in session.core.records[1:]:
                self._members.setdefault(record.step, len(record.members))
            for figures in session.figures.rounds:
                digests = self._states.setdefault(figures.step, {})
                digests[name] = figures.digest.encode()
            if name in self._hostile:
                continue
            for peer in session.core.convicted:
                self._named.setdefault((name, peer), session.step)
            if session.past_exchange is not None:
                self._moved = max(self._moved, self._moved_by(session.past_exchange.readys))

    def _moved_by(self, readys: Sequence[Ready]) -> float:
        """Return the largest weight of a hostile site's update in the mean, in median norms."""
        norms = {one.author: total_norm(one.norms) for one in readys}
        by, usual = shares_of(readys), usual_norm(norms)
        liars = [self._peers[int(name.removeprefix("site-"))] for name in self._hostile]
        return max(
            (float(by[one]) * norms[one] / usual for one in liars if one in norms), default=0.0
        )

    def _is_over(self, swarm: Swarm) -> bool:
        living = [node.name for node in swarm.alive]
        return bool(living) and all(
            name in self._sessions and self._sessions[name].is_over
            for name in living
            if name not in self._hostile
        )

    def _measure(self, swarm: Swarm) -> Mapping[str, float | int | str]:
        self._look()
        honest = {
            node.name: self._sessions[node.name]
            for node in swarm.alive
            if node.name not in self._hostile and node.name in self._sessions
        }
        wrongly = {
            peer
            for session in honest.values()
            for peer in session.core.convicted
            if peer not in [swarm.nodes[name].peer_id for name in self._hostile]
        }
        newest = max((session.step for session in honest.values()), default=-1)
        return {
            "rounds": min((session.step for session in honest.values()), default=-1),
            "newest": newest,
            "members_end": self._members.get(newest, 0),
            "replicas_differ": sum(
                len(dict.fromkeys(found.values())) > 1 for found in self._states.values()
            ),
            "wrongly_named": len(wrongly),
            "convicted": max((len(one.core.convicted) for one in honest.values()), default=0),
            "unnamed": sum(way not in BOUNDED for way in self._hostile.values())
            - min((len(one.core.convicted) for one in honest.values()), default=0),
            "named_by_round": max(self._named.values(), default=0),
            "moved": round(self._moved, 3),
            "steps_again": max(
                (sum(counts.values()) - len(counts) for counts in self._trained.values()),
                default=0,
            ),
            "views": max((one.figures.views for one in honest.values()), default=0),
            "utilised": round(
                min((one.figures.utilised for one in honest.values()), default=0.0), 3
            ),
            "loss": round(
                max((one.figures.training_loss or 0.0 for one in honest.values()), default=0), 5
            ),
            "seconds": round(swarm.simulation.now, 1),
        }
