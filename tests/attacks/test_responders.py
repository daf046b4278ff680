"""What peers that are no members get from a node, by every protocol that it answers.

Keys are free: what each is allowed bounds nothing. So each protocol has a row here, and a node
is asked by 32 fresh keys for the most that it gives. A protocol without a row fails.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, cast

import pytest
import trio

from p2p.dht.messages import FindNode, FindValue, encode
from p2p.gossip.messages import Rpc, encode_rpc
from p2p.host import Host, send_frame
from p2p.identity import PeerId
from p2p.ledger.core.exchange import Extent, Question
from p2p.membership.messages import Want, encode_message as encode_membership
from p2p.meter import BURST, RATE
from p2p.node.config import NodeConfig
from p2p.node.node import Node, open_node
from p2p.shardcast.messages import Hello, encode_message as encode_shardcast
from p2p.wire import MIB, pack
from roles.contract.core.file import Run, sign_run
from roles.diloco.core.messages import PIECES_PROTOCOL
from roles.diloco.exchange import PieceServer
from roles.protocol.core.account import MAX_ACCOUNT
from roles.protocol.core.answer import MAX_ANSWER
from sim.kernel.simulation import Simulation
from sim.kernel.virtual_time import run_simulation
from sim.node.host import SimHost
from sim.node.swarm import SimNode, open_swarm
from tests.support.pieces import in_memory
from tests.support.runs import TERMS

ROOT: Final = Path(__file__).parents[2]
STRANGERS, TIMES = 32, 12
BLOB: Final = in_memory([bytes([one]) * 256 * 1024 for one in range(4)])
SMALL: Final = 4096  # bytes of an answer that are no gift: opening a stream takes some hundred


@dataclass(frozen=True)
class Asked:
    """What is sent to a node, by one protocol; each frame on a stream of its own."""

    payloads: Callable[[Node, Run], list[bytes]]
    are_messages: bool = False
    most: float = BURST  # bytes that all strangers together get at once


ASKED: Final[dict[str, Asked]] = {
    "/shoal/run/1.0.0": Asked(lambda node, run: [pack([b"", 0])]),
    "/shoal/run-rival/1.0.0": Asked(lambda node, run: [pack([run.id, run.epoch, bytes(32)])]),
    "/shoal/clock/1.0.0": Asked(lambda node, run: [b""]),
    "/shoal/admission/1.0.0": Asked(lambda node, run: [b""]),
    "/shoal/ledger/1.0.0": Asked(
        lambda node, run: [Question({node.peer_id: Extent()}).to_bytes()]
    ),
    "/shoal/diloco/1.0.0": Asked(
        lambda node, run: [pack(["pieces", BLOB.root, 0, 4]), pack(["list", BLOB.root])]
    ),
    "/shoal/heartbeat/1.0.0": Asked(
        lambda node, run: [encode_membership(Want((node.peer_id.digest[-8:],) * 8))],
        are_messages=True,
    ),
    "/shoal/kad/1.0.0": Asked(
        lambda node, run: [
            encode(7, node.dht.contact, FindNode(run.id)),
            encode(8, node.dht.contact, FindValue(run.id)),
        ],
        are_messages=True,
        most=4 * MIB,
    ),
    "/meshsub/1.1.0": Asked(
        lambda node, run: [encode_rpc(Rpc(iwant=[bytes(40)] * 64, graft=["/a/topic"]))],
        are_messages=True,
    ),
    "/shoal/shardcast/1.0.0": Asked(
        lambda node, run: [encode_shardcast(Hello(-1))], are_messages=True
    ),
}

SMALL_ANSWERS: Final[dict[str, int]] = {"/shoal/work/1.0.0": max(MAX_ACCOUNT, MAX_ANSWER)}
"""Bytes of the one answer that a stream gets from a role, unless it hands in work."""

ANSWER_NOBODY: Final = {
    "/shoal/shardcast-bulk/1.0.0": "only reads; chunks and indexes wait for [share] upload",
    "/shoal/cast/modes/1.0.0": "a table, to those who know its digest; it counts as upload",
    "/shoal/work/answer/1.0.0": "a domain of signatures",
    "/shoal/work/verdict/1.0.0": "a domain of signatures",
    "/shoal/work/window/1.0.0": "a domain of signatures",
    "/shoal/diloco/rounds/3.0.0": "to others than members metered, as pieces are",
    "/libp2p/circuit/relay/0.2.0/hop": "a voucher or a refusal; circuits have limits",
    "/libp2p/circuit/relay/0.2.0/stop": "a status",
    "/libp2p/dcutr": "two messages, to peers that were dialled through a relay alone",
    "/libp2p/autonat/2/dial-request": "a status; dials cost the asker their bytes",
    "/libp2p/autonat/2/dial-back": "a status",
    "/ipfs/ping/1.0.0": "gives back what came",
    "/ipfs/id/push/1.0.0": "answers nothing",
    "/ipfs/id/1.0.0": "the host's own, a message of half a kilobyte",
    "/yamux/1.0.0": "a transport",
    "/noise": "a transport",
}


def declared() -> set[str]:
    """Every protocol id that p2p and roles name."""
    found = set[str]()
    for path in (*(ROOT / "p2p").rglob("*.py"), *(ROOT / "roles").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            node.target.id: node.value
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        for value in constants.values():
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "ProtocolId":
                argument = value.args[0]
                if isinstance(argument, ast.Name):
                    argument = constants.get(argument.id) or argument
                found.add(
                    argument.value
                    if isinstance(argument, ast.Constant)
                    else "/shoal/ledger/1.0.0"
                )
    return found - {""}


def test_every_protocol_has_a_row() -> None:
    assert declared() == {*ASKED, *SMALL_ANSWERS, *ANSWER_NOBODY}


@pytest.mark.parametrize("protocol", SMALL_ANSWERS)
def test_an_answer_of_a_role_is_small(protocol: str) -> None:
    assert SMALL_ANSWERS[protocol] <= SMALL


@dataclass
class Stage:
    """A node, and strangers that ask it by one protocol."""

    protocol: str
    upload: float
    nodes: list[Node] = field(default_factory=list)
    run: Run | None = None
    given: int = 0
    taken: int = 0

    async def main(self, simulation: Simulation) -> None:
        async with open_swarm(simulation) as swarm:
            keys = simulation.keys
            trainer = keys.signer("victim").peer_id
            terms = replace(TERMS, trainers=(trainer,))
            self.run = sign_run(terms, keys.signer("owner"))
            swarm.add("victim", self.victim)
            await swarm.sleep(20)
            strangers = [f"stranger-{number}" for number in range(STRANGERS)]
            for name in strangers:
                swarm.add(name, self.stranger)
            await swarm.sleep(30)
            host = cast("SimHost", self.nodes[0].host)
            for name in strangers:
                sent, received = host.traffic(swarm.nodes[name].peer_id)
                self.given, self.taken = self.given + sent, self.taken + received

    async def victim(self, machine: SimNode) -> None:
        config = NodeConfig()
        config = replace(
            config,
            dht=replace(config.dht, difficulty=1),
            share=replace(config.share, upload=self.upload),
        )
        assert self.run is not None
        async with (
            machine.open_host() as host,
            open_node(machine.world, host, config, document=self.run.document) as node,
        ):
            pieces = PieceServer(machine.world, lambda _: True, node.meter.allows)
            pieces.offer(BLOB)
            ledger = await node.ledger.opened()
            for number in range(20):
                await ledger.append("verdict", bytes([number]) * 60_000)
            with host.serving(PIECES_PROTOCOL, pieces.serve):
                self.nodes.append(node)
                await trio.sleep_forever()

    async def stranger(self, machine: SimNode) -> None:
        asked, node = ASKED[self.protocol], self.nodes[0]
        assert self.run is not None
        async with machine.open_host() as host, trio.open_nursery() as nursery:
            host.add_addrs(node.peer_id, node.host.addrs)
            await host.connect(node.peer_id)
            for payload in asked.payloads(node, self.run) * TIMES:
                if asked.are_messages:
                    host.send(node.peer_id, self.protocol, payload)
                else:
                    nursery.start_soon(self.ask, host, node.peer_id, payload)
            await trio.sleep_forever()

    async def ask(self, host: Host, peer: PeerId, payload: bytes) -> None:
        with suppress(trio.BrokenResourceError):
            async with await host.open_stream(peer, self.protocol) as stream:
                await send_frame(stream, payload)
                await stream.send_eof()
                while await stream.receive_some():
                    pass


def gift(protocol: str, upload: float = 0.0) -> tuple[int, int]:
    """Bytes that 32 fresh keys get of a node within half a minute, and that they send."""
    stage = Stage(protocol, upload)
    run_simulation(stage.main, seed=1, horizon=1000)
    return stage.given, stage.taken


@pytest.mark.parametrize("protocol", ASKED)
def test_fresh_keys_get_no_more_than_strangers_have_together(protocol: str) -> None:
    """`/shoal/ledger` gave 48.8 MB for 37 KB to 32 of them, evidence and pieces as much."""
    given, taken = gift(protocol)
    assert taken > STRANGERS * TIMES
    assert given <= ASKED[protocol].most + 30 * RATE + 32 * taken


def test_what_strangers_get_is_upload() -> None:
    """An owner that lends 64 KiB a second lends strangers an eighth of that."""
    upload = 64.0 * 1024
    given, taken = gift("/shoal/ledger/1.0.0", upload)
    assert 0 < given <= 16 * upload + 30 * upload / 8 + 32 * taken
