"""The driver: handshakes, streams over a connection, closing, and what ends it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from p2p.errors import ProtocolNotSupported, RemoteProtocolError
from p2p.identity import KeyPair, ProtocolId
from p2p.machine import RealWorld, open_world
from p2p.transport import dial
from p2p.transport.connection import Connection, MuxedStream, Secured, secure
from p2p.transport.core import noise, yamux
from p2p.transport.core.budget import Burst
from p2p.transport.core.negotiate import Chooser, Proposer, line
from p2p.transport.core.noise import NoiseHandshake, StaticKey
from p2p.transport.memory import memory_pair
from p2p.wire import KI, MIB
from tests.support.hosts import secure_pair

ECHO = ProtocolId("/test/echo")
NOBODY = ProtocolId("/test/nobody")
ALICE, BOB = KeyPair(b"\x01" * 32), KeyPair(b"\x02" * 32)


@dataclass
class Pair:
    """Alice dialled Bob; Bob serves ECHO by putting streams into ``accepted``."""

    world: RealWorld
    alice: Connection
    bob: Connection
    secured: Secured
    """What is below Alice's connection."""
    accepted: list[MuxedStream] = field(default_factory=list)
    arrived: trio.Event = field(default_factory=trio.Event)

    async def stream_pair(self) -> tuple[MuxedStream, MuxedStream]:
        """A stream, and Bob's end of it."""
        self.arrived = trio.Event()
        ours = self.alice.open_stream(ECHO)
        await self.arrived.wait()
        return ours, self.accepted[-1]


@asynccontextmanager
async def open_pair(keepalive: float = float("inf")) -> AsyncIterator[Pair]:
    """A pair for the length of the block."""
    async with open_world(key=ALICE) as world, trio.open_nursery() as nursery:
        secured = await secure_pair(world, ALICE, BOB)

        def accept(stream: MuxedStream) -> None:
            pair.accepted.append(stream)
            pair.arrived.set()

        serves: Callable[[ProtocolId], bool] = ECHO.__eq__
        alice, bob = (
            Connection(
                world, one, dialer=dialer, serves=serves, on_stream=accept, keepalive=keepalive
            )
            for one, dialer in zip(secured, (True, False), strict=True)
        )
        pair = Pair(world, alice, bob, secured[0])
        nursery.start_soon(pair.alice.run)
        nursery.start_soon(pair.bob.run)
        yield pair
        nursery.cancel_scope.cancel()


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    data = bytearray()
    while piece := await stream.receive_some():
        data += piece
    return bytes(data)


# Handshakes.


async def test_a_peer_without_early_muxers_negotiates_yamux_inside_noise() -> None:
    """As py-libp2p does, written out by hand."""
    async with open_world(key=ALICE) as world, trio.open_nursery() as nursery:
        ours, raw = memory_pair()
        results = []

        async def listen() -> None:
            static = StaticKey.create(ALICE, world.entropy(32))
            results.append(await secure(ours, static, world.entropy, dialer=False))

        nursery.start_soon(listen)
        with trio.fail_after(60):
            await _negotiate(raw, Proposer(noise.PROTOCOL_ID))
            handshake = NoiseHandshake(
                StaticKey.create(BOB, world.entropy(32)), world.entropy(32), initiator=True
            )
            await raw.send_all(handshake.data_to_send())
            while not handshake.session:
                handshake.receive_data(await raw.receive_some())
            await raw.send_all(handshake.data_to_send())
            session = handshake.session
            inner = Proposer(yamux.PROTOCOL_ID)
            await raw.send_all(session.seal(inner.data_to_send()))
            while inner.chosen is None:
                for piece in session.receive_data(await raw.receive_some()):
                    inner.receive_data(piece)
        await trio.testing.wait_all_tasks_blocked()
        assert results[0].peer == BOB.peer_id


async def _negotiate(raw: trio.abc.Stream, machine: Proposer | Chooser) -> None:
    await raw.send_all(machine.data_to_send())
    while machine.chosen is None:
        machine.receive_data(await raw.receive_some())


@pytest.mark.parametrize(
    "reply",
    [
        line("/multistream/1.0.0") + line("na"),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"",
        b"\xff" * 5000,
    ],
)
async def test_a_listener_that_is_no_shoal_node(reply: bytes) -> None:
    async with open_world(key=ALICE) as world:
        ours, theirs = memory_pair()
        await theirs.send_all(reply)
        await theirs.send_eof()
        with pytest.raises((RemoteProtocolError, ProtocolNotSupported)), trio.fail_after(60):
            await secure(
                ours, StaticKey.create(ALICE, world.entropy(32)), world.entropy, dialer=True
            )


async def test_plaintext_on_offer_is_refused() -> None:
    async with open_world(key=ALICE) as world, trio.open_nursery() as nursery:
        ours, theirs = memory_pair()

        async def listen() -> None:
            static = StaticKey.create(ALICE, world.entropy(32))
            with pytest.raises(RemoteProtocolError):
                await secure(ours, static, world.entropy, dialer=False)

        nursery.start_soon(listen)
        await theirs.send_all(line("/multistream/1.0.0") + line("/plaintext/2.0.0"))
        answer = await theirs.receive_some() + await theirs.receive_some()
        assert answer == line("/multistream/1.0.0") + line("na")
        await theirs.send_eof()


# Streams.


async def test_data_may_follow_the_proposal_at_once() -> None:
    async with open_pair() as pair:
        ours = pair.alice.open_stream(ECHO)
        await ours.send_all(b"early")
        assert not ours.is_negotiated
        await pair.arrived.wait()
        assert await pair.accepted[0].receive_some() == b"early"
        await ours.wait_negotiated()
        assert ours.is_negotiated


async def test_a_lazy_stream_of_an_unknown_protocol_breaks() -> None:
    async with open_pair() as pair:
        ours = pair.alice.open_stream(NOBODY)
        await ours.send_all(b"early")
        with pytest.raises(trio.BrokenResourceError, match="does not speak"):
            await ours.receive_some()
        with pytest.raises(ProtocolNotSupported):
            await pair.alice.open_stream(NOBODY).wait_negotiated()


async def test_closing_before_the_answer_to_a_negotiation_loses_nothing() -> None:
    async with open_pair() as pair:
        ours = pair.alice.open_stream(ECHO)
        await ours.send_all(b"fire and forget")
        await ours.aclose()
        await pair.arrived.wait()
        assert await read_all(pair.accepted[0]) == b"fire and forget"


async def test_try_send_is_all_or_nothing() -> None:
    async with open_pair() as pair:
        ours, theirs = await pair.stream_pair()
        assert ours.try_send(b"one")
        assert not ours.try_send(bytes(5 * MIB))
        assert ours.try_send(b"two")
        await ours.aclose()
        assert not ours.try_send(b"three")
        assert await read_all(theirs) == b"onetwo"


async def test_what_has_arrived_can_be_read_after_everything_is_over() -> None:
    async with open_pair() as pair:
        ours, theirs = await pair.stream_pair()
        await ours.send_all(b"last words")
        await ours.send_eof()
        await theirs.send_eof()
        await trio.testing.wait_all_tasks_blocked()
        assert pair.bob.mux.stream_ids == ()
        pair.alice.close()
        await pair.bob.wait_closed()
        assert await theirs.receive_some(4) == b"last"
        assert await read_all(theirs) == b" words"
        assert await theirs.receive_some() == b""  # the end stays the end


# Dials.


async def test_a_silent_address_holds_up_no_other(autojump_clock) -> None:
    async def attempt(place):
        return place or await trio.sleep_forever()

    with trio.fail_after(1):
        found = await dial.stagger([None, memory_pair()[0]], attempt, ())
    assert isinstance(found, tuple)


async def test_few_addresses_are_tried_at_once(autojump_clock) -> None:
    slots = trio.CapacityLimiter(4)

    async def hang(place):
        slots.acquire_on_behalf_of_nowait(place)
        with trio.move_on_after(60):
            await trio.sleep_forever()
        slots.release_on_behalf_of(place)
        raise trio.TooSlowError

    assert len(await dial.stagger(range(9), hang, (trio.TooSlowError,))) == 9


# Ends.


async def test_garbage_under_noise_ends_the_connection_with_a_reason() -> None:
    async with open_pair() as pair:
        await pair.secured.raw.send_all(b"\x00\x20" + bytes(32))
        await pair.bob.wait_closed()
        assert "authenticate" in str(pair.bob.failure)


async def test_a_stream_that_is_reset_with_what_opened_it_harms_nobody() -> None:
    async with open_pair() as pair:
        pair.alice.open_stream(ECHO).reset()
        other, far = await pair.stream_pair()
        await other.send_all(b"still there")
        assert await far.receive_some() == b"still there"


async def test_a_negotiation_that_is_reset_as_it_ends_harms_nobody() -> None:
    async with open_pair() as pair:
        mux = pair.alice.mux
        stream_id = mux.open_stream()
        pair.alice.flush()
        await trio.testing.wait_all_tasks_blocked()
        proposal = line("/multistream/1.0.0") + line(ECHO)
        mux.queue.say(yamux.DATA, 0, stream_id, len(proposal))
        mux.queue.control += proposal
        mux.queue.say(yamux.WINDOW_UPDATE, yamux.RST, stream_id, 0)
        pair.alice.flush()
        with trio.fail_after(60):
            await pair.arrived.wait()
        with pytest.raises(trio.BrokenResourceError):
            await pair.accepted[0].send_all(b"to nobody")


@asynccontextmanager
async def open_to_nobody(keepalive: float = float("inf")) -> AsyncIterator[Connection]:
    """A connection whose other end reads nothing and says nothing."""
    async with open_world(key=ALICE) as world, trio.open_nursery() as nursery:
        secured, _ = await secure_pair(world, ALICE, BOB)
        serves: Callable[[ProtocolId], bool] = ECHO.__eq__
        options = {"serves": serves, "on_stream": lambda _: None, "keepalive": keepalive}
        connection = Connection(world, secured, dialer=True, **options)
        nursery.start_soon(connection.run)
        yield connection


async def test_a_peer_that_hangs_is_given_up_after_four_intervals(autojump_clock) -> None:
    async with open_to_nobody(keepalive=10) as connection:
        with trio.fail_after(50) as patience:
            await connection.wait_closed()
        assert patience.deadline - connection.budget.now() <= 20
        assert connection.failure is None


async def test_a_peer_that_takes_nothing_does_not_hold_up_the_end(autojump_clock) -> None:
    async with open_to_nobody() as connection:
        for _ in range(4):  # more than the pipe takes
            assert connection.open_stream(ECHO).try_send(bytes(200 * KI))
        await trio.testing.wait_all_tasks_blocked()
        connection.close()
        with trio.fail_after(5):
            await connection.wait_closed()


async def test_idle_connections_live_on_pings(autojump_clock) -> None:
    async with open_pair(10) as pair:
        await pair.world.sleep(1000)
        assert pair.alice.is_open
        assert pair.bob.is_open


async def test_a_stream_that_never_says_its_protocol_is_reset(autojump_clock) -> None:
    async with open_pair(10) as pair:
        pair.alice.mux.open_stream()
        pair.alice.flush()
        await pair.world.sleep(5)
        assert len(pair.bob.mux.stream_ids) == 1
        await pair.world.sleep(30)
        assert pair.bob.mux.stream_ids == ()


def test_a_connection_commits_to_what_its_line_empties_soon() -> None:
    burst = Burst(256 * KI)
    for _ in range(10):
        burst.note_slow(64 * KI, 0.1)
    assert burst.size == pytest.approx(64 * KI, rel=0.01)
    for _ in range(10):
        burst.note_slow(64 * KI, 60.0)
    assert burst.size == 32 * KI
    for _ in range(100):
        burst.note_free()
    assert burst.size == 256 * KI
    burst.note_slow(1, 0.0)
    assert burst.size == 256 * KI
