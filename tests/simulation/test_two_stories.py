"""A validator that tells two stories, in a swarm of whole nodes on virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import trio

from p2p.host import Stream, send_frame
from p2p.identity import Signer
from p2p.ledger.core.chain import EMPTY, Head, check_link, make_entry, sign_head
from p2p.ledger.core.exchange import (
    LEDGER_PROTOCOL,
    MAX_QUESTION,
    Exchange,
    decode_question_untrusted,
)
from p2p.node.config import NodeConfig
from p2p.node.node import Node
from p2p.wire import FrameReader
from sim.node.swarm import SimNode, Swarm
from sim.workloads.run_file import open_member, write_run
from tests.support.simulated import on_swarm

LIAR, JUDGE = "n1", "n2"
SETTLED = 120.0  # when the liar begins: by then the nodes know each other


@dataclass
class Stage:
    """Whole nodes; the second is a validator that tells every other peer another story."""

    swarm: Swarm
    size: int
    nodes: dict[str, Node] = field(default_factory=dict)
    lies_from: float = SETTLED
    is_mute: bool = False  # whether its heartbeats say nothing of its ledger
    told: dict[int, int] = field(default_factory=dict)
    """How many questions were answered with either story."""

    both_at: float = 0.0
    """When the second story was told: a liar that is asked by nobody has told none."""

    def __post_init__(self) -> None:
        keys = self.swarm.simulation.keys
        judges = tuple(keys.signer(name).peer_id for name in (LIAR, JUDGE))
        self.run = write_run(keys, "stories", "n0", LIAR, validators=judges)
        config = NodeConfig()
        self.config = replace(config, dht=replace(config.dht, difficulty=4))
        for number in range(self.size):
            self.swarm.add(f"n{number}", self.live)

    async def live(self, machine: SimNode) -> None:
        await self.swarm.sleep(0.1 * len(self.nodes))
        async with open_member(machine, self.config, self.run) as node:
            self.nodes[machine.name] = node
            if machine.name == LIAR:
                await self.lie(node)
            elif machine.name == JUDGE:
                ledger = await node.ledger.opened()
                for number in range(100):
                    await ledger.append("verdict", b"%d" % number)
                    await self.swarm.sleep(3)
            await trio.sleep_forever()

    async def lie(self, node: Node) -> None:
        """Its heartbeats tell one story, and its answers either, by who asks."""
        stories = list(two_stories(node.world.signer))

        async def serve(stream: Stream) -> None:
            asked = await FrameReader(stream, MAX_QUESTION).receive()
            if asked is not None:
                which = stream.peer.digest[-1] % 2
                self.told[which] = self.told.get(which, 0) + 1
                if len(self.told) == 2 and not self.both_at:
                    self.both_at = self.swarm.simulation.now
                answer = stories[which].answer(decode_question_untrusted(asked))
                await send_frame(stream, answer.to_bytes())

        await self.swarm.sleep_until(self.lies_from)
        node.ledgers.follow(())  # or its node ends when it hears what it has signed
        node.host.set_handler(LEDGER_PROTOCOL, serve, replaces=True)
        tops = [list(one.statements(node.peer_id))[-1] for one in stories]
        head = sign_head(Head(tops[0].seqno, tops[0].digest), node.world.signer)
        if not self.is_mute:
            self.both_at = self.lies_from
            node.membership.me.update(ledger=head.brief())

    def knowing(self) -> int:
        liar = self.swarm.nodes[LIAR].peer_id
        return sum(
            node.ledgers.is_forked(liar) for name, node in self.nodes.items() if name != LIAR
        )

    async def play(self) -> tuple[float, float]:
        """Seconds from the second story to the first proof of it, and until all know."""
        await self.swarm.sleep_until(self.lies_from)
        first = 0.0
        while self.knowing() < self.size - 1:
            await self.swarm.sleep(0.5)
            if self.knowing():
                first = first or self.swarm.simulation.now
        return first - self.both_at, self.swarm.simulation.now - self.both_at


def two_stories(signer: Signer) -> Iterator[Exchange]:
    for story in (b"one", b"other"):
        exchange, head = Exchange(lambda *_: True), EMPTY
        exchange.follow([signer.peer_id])
        for number in range(20):
            body = story if number >= 10 else b""
            entry = make_entry(head, signer, "verdict", body, 1000.0)
            head = check_link(head, entry)
            exchange.take_untrusted(entry)
        yield exchange


@pytest.mark.parametrize("is_mute", [False, True])
def test_two_stories_are_proven_to_all_within_a_minute(is_mute: bool) -> None:
    """Nobody else is accused, no statement of the liar counts, and the judge's arrive."""

    async def main(swarm: Swarm) -> None:
        stage = Stage(swarm, 12, is_mute=is_mute)
        first, everyone = await stage.play()
        assert first <= everyone < 60
        await swarm.sleep(60)
        liar, judge = (swarm.nodes[name].peer_id for name in (LIAR, JUDGE))
        assert len(stage.told) == 2
        nodes = list(stage.nodes.values())
        honest = [node for name, node in stage.nodes.items() if name != LIAR]
        assert {len(node.ledgers.exchange.forks) for node in honest} == {1}
        assert not any([*node.ledgers.exchange.statements(liar)] for node in nodes)
        tops = sorted(node.ledgers.exchange.top(judge) for node in nodes)
        assert stage.nodes[JUDGE].ledgers.exchange.top(judge) - tops[len(tops) // 10] <= 15

    on_swarm(main, horizon=SETTLED + 600)
