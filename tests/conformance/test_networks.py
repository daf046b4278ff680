"""The laws of the `Network` seam: every implementation keeps them."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from p2p.errors import ConfigError, PeerUnreachable
from p2p.identity import KeyPair
from tests.conformance.conftest import Networks, law_of, read_all


async def connect(
    nets: Networks,
) -> tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]:
    """A dialled stream and its other end."""
    listener = await nets.listener.listen(nets.anywhere)
    accepted = []

    async def accept() -> None:
        accepted.append(await listener.accept())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        dialled = await nets.dialer.dial(listener.addr)
    await listener.aclose()
    return dialled, accepted[0]


async def connect_clogged(
    nets: Networks,
) -> tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]:
    """The same, with neither end able to send more."""
    ends = await connect(nets)

    async def fill(stream: trio.abc.SendStream) -> None:
        while True:
            await stream.send_all(bytes(65536))

    for _ in range(2):  # a kernel may accept a little more once it has settled
        async with trio.open_nursery() as nursery:
            for end in ends:
                nursery.start_soon(fill, end)
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.cancel_scope.cancel()
    return ends


@law_of("networks")
async def test_bytes_go_both_ways_at_once(nets: Networks) -> None:
    sent, received = bytes(range(256)) * 8192, []
    ends = await connect(nets)

    async def send(stream: trio.abc.HalfCloseableStream) -> None:
        await stream.send_all(sent)
        await stream.send_eof()

    async def receive(stream: trio.abc.HalfCloseableStream) -> None:
        received.append(await read_all(stream))

    async with trio.open_nursery() as nursery:
        for end in ends:
            nursery.start_soon(send, end)
            nursery.start_soon(receive, end)
    for end in ends:
        await end.aclose()
    assert received == [sent, sent]


@law_of("networks")
async def test_streams_keep_trios_rules(nets: Networks) -> None:
    await trio.testing.check_half_closeable_stream(
        lambda: connect(nets), lambda: connect_clogged(nets)
    )


@law_of("networks")
async def test_a_sender_waits_for_a_slow_reader(nets: Networks) -> None:
    dialled, accepted = await connect(nets)
    limit = 64 * 1024 * 1024
    sent = 0

    async def fill() -> None:
        nonlocal sent
        while sent < limit:
            await dialled.send_all(bytes(65536))
            sent += 65536

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert sent < limit
        nursery.cancel_scope.cancel()
    await dialled.aclose()
    await accepted.aclose()


@law_of("networks")
async def test_nobody_there_is_unreachable(nets: Networks) -> None:
    with pytest.raises(PeerUnreachable):
        await nets.dialer.dial(nets.nowhere)


@law_of("places")
async def test_the_peer_id_of_an_address_is_ignored(nets: Networks) -> None:
    listener = await nets.listener.listen(nets.anywhere)
    named = listener.addr.with_peer(KeyPair(bytes(32)).peer_id)
    async with await nets.dialer.dial(named), await listener.accept():
        pass
    await listener.aclose()


@law_of("places")
async def test_a_listener_knows_where_it_really_is(nets: Networks) -> None:
    one = await nets.listener.listen(nets.anywhere)
    other = await nets.listener.listen(nets.anywhere)
    assert one.addr != nets.anywhere
    assert one.addr != other.addr
    await one.aclose()
    await other.aclose()


@law_of("networks")
async def test_an_address_can_be_had_once_and_again_after_closing(nets: Networks) -> None:
    listener = await nets.listener.listen(nets.anywhere)
    with pytest.raises(ConfigError):
        await nets.listener.listen(listener.addr)
    await listener.aclose()
    with pytest.raises(PeerUnreachable):
        await nets.dialer.dial(listener.addr)
    again = await nets.listener.listen(listener.addr)
    assert again.addr == listener.addr
    await again.aclose()


@law_of("networks")
async def test_closing_a_listener_wakes_who_accepts(nets: Networks) -> None:
    listener = await nets.listener.listen(nets.anywhere)

    async def accept() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await listener.accept()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept)
        await trio.testing.wait_all_tasks_blocked()
        await listener.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await listener.accept()


@law_of("networks")
async def test_streams_outlive_their_listener(nets: Networks) -> None:
    dialled, accepted = await connect(nets)  # the listener is closed by now
    await dialled.send_all(b"still here")
    await dialled.send_eof()
    assert await read_all(accepted) == b"still here"
    await dialled.aclose()
    await accepted.aclose()
