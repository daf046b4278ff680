"""A state from several members at once: faster by their number, and whole whatever one does."""

from __future__ import annotations

import pytest
import trio

from p2p.host import Stream
from p2p.world import World
from roles.diloco.core.messages import PIECES_PROTOCOL
from roles.diloco.exchange import Blob, PieceClient, PieceServer, PiecesUnavailable
from sim.net.link import LinkSpec
from sim.node.swarm import SimNode, Swarm
from tests.support.pieces import in_memory
from tests.support.simulated import on_swarm
from tests.sweeps import swept

PIECES = [bytes([one]) * 200_000 for one in range(48)]
SOURCE = LinkSpec(up=8.0, down=100.0)
JOINER = LinkSpec(up=8.0, down=100.0)


class Liar(PieceServer):
    """Gives other bytes than it was asked for."""

    def offer(self, blob: Blob) -> bytes:
        return super().offer(in_memory([bytes(200_000)] * 48, blob.digests))


class Half(PieceServer):
    """Has the list, and half of the pieces."""

    def offer(self, blob: Blob) -> bytes:
        half = [piece if one < 24 else piece[:-1] for one, piece in enumerate(PIECES)]
        return super().offer(in_memory(half, blob.digests))


class Dripper(PieceServer):
    """Has all, and gives a byte a second."""

    async def _give(self, stream: Stream, root: bytes, first: int, count: int) -> None:
        for byte in b"\xff" * 1000:
            await stream.send_all(bytes([byte]))
            await self._world.sleep(1.0)


class Mute(PieceServer):
    """Takes every question, and answers none."""

    async def serve(self, stream: Stream) -> None:
        await trio.sleep_forever()


def fetched(kinds: list[type[PieceServer]], most: float = 600.0) -> tuple[float, list[bytes]]:
    """Seconds, and the pieces, of one joiner from sources of these kinds."""
    done: list[tuple[float, list[bytes]]] = []

    async def source(kind: type[PieceServer], machine: SimNode) -> None:
        server = kind(machine.world, lambda peer: True)
        server.offer(in_memory(PIECES))
        async with machine.open_host() as host:
            with host.serving(PIECES_PROTOCOL, server.serve):
                await trio.sleep_forever()

    async def joiner(machine: SimNode) -> None:
        world: World = machine.world
        async with machine.open_host() as host:
            for other in machine.siblings:
                host.add_addrs(other.peer_id, [other.addr])
            client = PieceClient(world, host)
            began = world.now()
            sources = [other.peer_id for other in machine.siblings]
            found: dict[int, bytes] = {}

            async def take(index: int, piece: bytes) -> None:
                found[index] = piece

            try:
                await client.blob(in_memory(PIECES).root, sources, len(PIECES), take)
            except PiecesUnavailable:
                found.clear()
            done.append((world.now() - began, [found[one] for one in sorted(found)]))

    async def play(swarm: Swarm) -> None:
        for number, kind in enumerate(kinds):
            swarm.add(f"s{number}", lambda machine, k=kind: source(k, machine), link=SOURCE)
        await swarm.sleep(1)
        swarm.add("joiner", joiner, link=JOINER)
        while not done and swarm.simulation.now < most:
            await swarm.sleep(0.5)

    on_swarm(play)
    return done[0]


@pytest.fixture(scope="module")
def alone() -> float:
    seconds, pieces = fetched([PieceServer])
    assert pieces == PIECES
    return seconds


@pytest.mark.parametrize("sources", swept([2, 3, 4], 1))
def test_recovery_from_several_is_faster_by_their_number(alone: float, sources: int) -> None:
    """At least 0.7 times as much faster; PRIME's joiner had one source, picked by hand."""
    seconds, pieces = fetched([PieceServer] * sources)
    assert pieces == PIECES
    assert alone / seconds >= 0.7 * sources


@pytest.mark.parametrize("kind", [Liar, Half])
def test_one_source_that_lies_or_has_half_does_no_harm(kind: type[PieceServer]) -> None:
    for kinds in ([kind, PieceServer, PieceServer], [PieceServer, kind]):
        _, pieces = fetched(kinds)
        assert pieces == PIECES


@pytest.mark.parametrize("kind", [Dripper, Mute])
def test_a_source_that_drips_delays_no_recovery(alone: float, kind: type[PieceServer]) -> None:
    """The first source was waited for, two minutes for the list and one for each piece; now
    what one has under way another brings as well."""
    seconds, pieces = fetched([kind, PieceServer, PieceServer])
    assert pieces == PIECES
    assert seconds < alone


def test_without_an_honest_source_there_is_no_state() -> None:
    _, pieces = fetched([Liar, Liar])
    assert pieces == []
