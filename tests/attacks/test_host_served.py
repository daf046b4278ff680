"""Streams held without end. Messages never finished. Floods of messages."""

from __future__ import annotations

import contextlib
from contextlib import ExitStack

import pytest
import trio
import trio.testing

from p2p.errors import LimitExceeded, PeerUnreachable, ProtocolNotSupported
from p2p.host import MAX_MESSAGE, Stream, request, serve_requests
from p2p.identity import KeyPair, PeerId, ProtocolId
from p2p.swarm import identify, swarm as swarm_module
from p2p.swarm.core import limits as limits_module
from p2p.swarm.swarm import SwarmConfig, SwarmHost, ping
from p2p.wire import encode_varint, frame
from tests.support.hosts import hosts

ECHO = ProtocolId("/test/echo")
NEWS = ProtocolId("/test/news")
QUIET = SwarmConfig(keepalive=float("inf"), identify=False)


async def echo(peer: PeerId, data: bytes) -> bytes:
    return data


async def hold_streams(
    host: SwarmHost, victim: SwarmHost, count: int, data: bytes = b""
) -> list[Stream]:
    streams = []
    for _ in range(count):
        try:
            streams.append(await host.open_stream(victim.peer_id, ECHO))
            if data:
                await streams[-1].send_all(data)
        except (PeerUnreachable, LimitExceeded, ProtocolNotSupported, trio.BrokenResourceError):
            break
    return streams


async def test_peers_that_hold_streams_starve_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, idle streams of 36 connections took all 8,192 places."""
    monkeypatch.setattr(limits_module, "MAX_SERVED", 64)
    async with hosts(4, QUIET) as (victim, one, two, honest):
        victim.set_handler(ECHO, serve_requests(echo))
        for host in (one, two, honest):
            await host.connect_addr(victim.addrs[0])
        for host in (one, two):
            await hold_streams(host, victim, 50)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(60):
            for _ in range(20):
                assert await request(honest, victim.peer_id, ECHO, b"still") == b"still"


async def test_a_burst_of_streams_leaves_few_tasks_behind() -> None:
    async with hosts(2, QUIET) as (victim, one):
        victim.set_handler(ECHO, serve_requests(echo))
        await one.connect_addr(victim.addrs[0])
        for stream in await hold_streams(one, victim, 100):
            await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert victim.budget.served == 0
        assert len(victim._idle_servers) <= 16


async def test_a_peer_has_few_streams_of_what_needs_few() -> None:
    """Beyond the list: before, 256 idle pings of each peer; of 700 peers 4,096, or 45 MiB."""
    async with hosts(3, QUIET) as (victim, one, other):
        for host in (one, other):
            await host.connect_addr(victim.addrs[0])
        held = []
        for _ in range(20):
            with contextlib.suppress(PeerUnreachable, trio.BrokenResourceError):
                held.append(await one.open_stream(victim.peer_id, identify.PING_ID))
            await trio.testing.wait_all_tasks_blocked()
        assert victim.budget.served == swarm_module.FEW_STREAMS[identify.PING_ID]
        assert await ping(other, victim.peer_id) < 5
        for stream in held:
            stream.reset()
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(20):  # one after the other, at once
            assert await ping(one, victim.peer_id) < 5


def test_the_peer_with_the_most_streams_loses_its_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits_module, "MAX_SERVED", 12)
    few, many, friend = (KeyPair(bytes([number]) * 32).peer_id for number in (1, 2, 3))
    budget = limits_module.Budget(limits_module.ResourceLimits(), friend.__eq__)
    streams = {
        peer: [limits_module.ServedStream(peer, bool) for _ in range(count)]
        for peer, count in ((few, 2), (many, 4), (friend, 6))
    }
    for own in streams.values():
        assert not any(budget.serve(one) for one in own)
    late = [limits_module.ServedStream(few, bool) for _ in range(2)]
    assert budget.serve(late[0]) is streams[many][-1]
    assert budget.serve(late[1]) is late[1]  # now it has the most itself
    for own in (*streams.values(), late):
        for one in own:
            budget.served_to_end(one)
    assert budget.served == 0


@pytest.mark.parametrize("kind", ["messages", "requests"])
async def test_a_frame_has_a_deadline(kind: str, autojump_clock: trio.abc.Clock) -> None:
    """Before, a frame that was begun was held for as long as its sender liked."""
    async with hosts(2, QUIET) as (victim, one):
        victim.protect("test", [one.peer_id])
        one.protect("test", [victim.peer_id])
        blocks = ExitStack()
        if kind == "messages":
            blocks.enter_context(victim.receiving(ECHO, lambda peer, message: None))
        else:
            victim.set_handler(ECHO, serve_requests(echo))
        await one.connect_addr(victim.addrs[0])
        idle = await one.open_stream(victim.peer_id, ECHO)
        if kind == "messages":  # a second one would replace it
            await idle.aclose()
        (unfinished,) = await hold_streams(
            one, victim, 1, encode_varint(MAX_MESSAGE) + bytes(200_000)
        )
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(120), pytest.raises(trio.BrokenResourceError):
            await unfinished.receive_some()
        assert one.connected  # slow is not hostile
        if kind == "requests":
            await idle.send_all(frame(b"idle between frames is fine"))
            assert await idle.receive_some()


async def test_unfinished_frames_are_bounded_over_all_peers() -> None:
    """Before, every stream could hold up to 1 MiB of an unfinished frame: 8 GiB in all."""
    async with hosts(3, QUIET) as (victim, one, honest):
        victim.memory.max_held = 2_000_000
        victim.set_handler(ECHO, serve_requests(echo))
        await one.connect_addr(victim.addrs[0])
        await honest.connect_addr(victim.addrs[0])
        (kept,) = await hold_streams(honest, victim, 1, encode_varint(100) + bytes(50))
        await hold_streams(one, victim, 40, encode_varint(MAX_MESSAGE) + bytes(200_000))
        await trio.testing.wait_all_tasks_blocked()
        assert 0 < victim.memory.held <= 2_000_000
        await kept.send_all(bytes(50))
        assert await kept.receive_some()


async def test_a_peer_has_one_stream_for_the_messages_of_a_protocol() -> None:
    """Before, each of 256 streams was read, and held a frame of its own."""
    received = []
    async with hosts(2, QUIET) as (victim, one):
        with victim.receiving(NEWS, lambda _, message: received.append(message)):
            await one.connect_addr(victim.addrs[0])
            streams = [await one.open_stream(victim.peer_id, NEWS) for _ in range(5)]
            await trio.testing.wait_all_tasks_blocked()
            assert victim.budget.served == 1
            await streams[-1].send_all(frame(b"the newest counts"))
            with pytest.raises(trio.BrokenResourceError):
                await streams[0].receive_some()
            await trio.testing.wait_all_tasks_blocked()
            assert received == [b"the newest counts"]


async def test_empty_messages_are_taken_no_faster_than_the_rate(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Before, 98 KB/s of empty messages cost 54 % of a core, up to 65,536 in one go."""
    count = 0

    def take(peer: PeerId, message: bytes) -> None:
        nonlocal count
        count += 1

    async with hosts(2, QUIET) as (victim, one), trio.open_nursery() as nursery:
        with victim.receiving(NEWS, take):
            await one.connect_addr(victim.addrs[0])
            stream = await one.open_stream(victim.peer_id, NEWS)
            nursery.start_soon(stream.send_all, bytes(100_000))
            with trio.move_on_after(2.0):
                await trio.sleep_forever()
            limit = 4096.0 + 2 * swarm_module.MESSAGE_RATE
            assert 0.9 * limit < count < 1.1 * limit
            nursery.cancel_scope.cancel()


def test_one_peer_has_a_share_of_the_served_streams() -> None:
    peer = KeyPair(bytes(32)).peer_id
    budget = limits_module.Budget(limits_module.ResourceLimits(), {peer}.__contains__)
    served = [limits_module.ServedStream(peer, bool) for _ in range(300)]
    refused = [stream for stream in served if budget.serve(stream) is stream]
    assert len(refused) == 300 - 256 == 44
