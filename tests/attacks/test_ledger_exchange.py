"""Hosts that exchange ledgers, and what one of them can do to the others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from p2p.errors import StorageError
from p2p.host import Host, Stream, request, send_frame
from p2p.identity import PeerId
from p2p.ledger import ExchangeConfig, Ledger, LedgerExchange
from p2p.ledger.core.exchange import (
    LEDGER_PROTOCOL,
    MAX_ANSWER,
    MAX_QUESTION,
    Answer,
    Extent,
    Question,
)
from p2p.wire import FrameReader
from sim.node.swarm import SimNode, Swarm
from tests.support.simulated import on_swarm

JUDGE, BOASTER = "n0", "n1"
CONFIG = ExchangeConfig(is_on=True)


@dataclass
class Stage:
    """Hosts that know each other; the first is the run's only validator."""

    swarm: Swarm
    size: int
    exchanges: dict[str, LedgerExchange] = field(default_factory=dict)
    owns: dict[str, Ledger] = field(default_factory=dict)
    acts: dict[str, Callable[[SimNode, Host], Awaitable[None]]] = field(default_factory=dict)
    """What a node does instead of exchanging ledgers."""
    ended: list[StorageError] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number in range(self.size):
            self.swarm.add(f"n{number}", self.live)

    @property
    def judge(self) -> PeerId:
        return self.swarm.nodes[JUDGE].peer_id

    async def live(self, machine: SimNode) -> None:
        others = [one for one in machine.siblings if one is not machine]
        own = self.owns[machine.name] = Ledger(machine.world)
        async with machine.open_host() as host:
            for other in others:
                host.add_addrs(other.peer_id, [other.addr])
            if machine.name in self.acts:
                await self.acts[machine.name](machine, host)
                return
            peers = [one.peer_id for one in others]
            one = LedgerExchange(machine.world, host, own, CONFIG, lambda: peers)
            with one.serving():
                self.exchanges[machine.name] = one
                one.follow([self.judge])
                try:
                    await one.run(lambda _: None)
                except* StorageError as group:
                    self.ended += group.exceptions


BACKUP = ("ledger/00000000.seg", "ledger/synced")


@pytest.mark.parametrize("are_copies_lost", [False, True])
def test_a_ledger_that_came_from_a_backup_ends_its_node(are_copies_lost: bool) -> None:
    """Its peers have what was signed since: with its next entries the validator would convict
    itself. Where its own copies are gone, too, the first peer that it asks tells it."""

    async def scene(swarm: Swarm) -> None:
        stage = Stage(swarm, 4)
        machine = swarm.nodes[JUDGE]
        await swarm.sleep(1)
        ledger = await stage.owns[JUDGE].opened()
        await ledger.append("verdict", b"first")
        old = {path: machine.disk.read_now(path, 0, None) for path in BACKUP}
        for number in range(3):
            await ledger.append("verdict", b"%d" % number)
        await swarm.sleep(60)
        assert all(one.exchange.top(stage.judge) == 3 for one in stage.exchanges.values())
        swarm.kill(JUDGE)
        for path, data in old.items():
            machine.disk.replace_now(path, data)
        if are_copies_lost:
            machine.disk.remove_now(f"ledgers/{stage.judge}")
        swarm.restart(JUDGE)
        await swarm.sleep(10)
        assert ["told its peers of entry 3" in str(error) for error in stage.ended] == [True]
        assert "restore the ledger as it was" in str(stage.ended[0])
        assert not any(one.exchange.forks for one in stage.exchanges.values())

    on_swarm(scene)


def test_one_that_claims_to_know_more_does_not_keep_all_questions_to_itself() -> None:
    """It told everybody each second of an entry far ahead, was asked by all, and had nothing;
    what the validator signed went nowhere."""
    asked: list[float] = []

    async def boast(machine: SimNode, host: Host) -> None:
        async def serve(stream: Stream) -> None:
            asked.append(machine.simulation.now)
            await FrameReader(stream, MAX_QUESTION).receive()
            await send_frame(stream, Answer().to_bytes())

        far = Extent(2**60, bytes(32))
        question = Question({machine.siblings[0].peer_id: far}).to_bytes()
        with host.serving(LEDGER_PROTOCOL, serve):
            while True:
                for other in machine.siblings:
                    if other is not machine:
                        await request(
                            host, other.peer_id, LEDGER_PROTOCOL, question, max_reply=MAX_ANSWER
                        )
                await machine.world.sleep(2)

    async def scene(swarm: Swarm) -> None:
        stage = Stage(swarm, 8, acts={BOASTER: boast})
        await swarm.sleep(30)
        ledger = await stage.owns[JUDGE].opened()
        await ledger.append("verdict", b"one")
        began = swarm.simulation.now
        while any(one.exchange.top(stage.judge) < 0 for one in stage.exchanges.values()):
            await swarm.sleep(1)
            assert swarm.simulation.now < began + 60
        asked.clear()
        await swarm.sleep(240.0)  # a claim that brought nothing is doubted for 120 s
        honest, rounds = len(stage.exchanges), 240.0 / CONFIG.interval
        assert 0 < len(asked) < honest * rounds / 2

    on_swarm(scene)
