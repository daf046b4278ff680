"""The laws of the `Host` seam: every implementation keeps them."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from p2p.errors import (
    BadMessage,
    LocalProtocolError,
    PeerUnreachable,
    ProtocolNotSupported,
    WrongPeer,
)
from p2p.host import (
    MAX_MESSAGE,
    MAX_OUTBOX,
    AddrSource,
    Host,
    PeerEvent,
    PeerState,
    Stream,
    request,
    send_frame,
    serve_requests,
)
from p2p.identity import PeerId, ProtocolId
from p2p.multiaddr import Multiaddr
from tests.conformance.conftest import Hosts, law_of, read_all

ECHO = ProtocolId("/shoal/test-echo/1.0.0")
NEWS = ProtocolId("/shoal/test-news/1.0.0")


async def echo(peer: PeerId, data: bytes) -> bytes:
    return data


class Mailbox:
    """A message handler, and somebody to wait for what it gets."""

    def __init__(self, host: Host, protocol: ProtocolId = NEWS) -> None:
        self.received: list[tuple[PeerId, bytes]] = []
        self._changed = trio.Event()
        self._block = host.receiving(protocol, self._take)
        self._block.__enter__()  # for as long as there is this mailbox

    def _take(self, peer: PeerId, message: bytes) -> None:
        self.received.append((peer, message))
        self._changed.set()
        self._changed = trio.Event()

    async def wait(self, count: int) -> list[tuple[PeerId, bytes]]:
        while len(self.received) < count:
            await self._changed.wait()
        return self.received


class Watch:
    """Peer events, and somebody to wait for them."""

    def __init__(self, host: Host) -> None:
        self.events: list[PeerEvent] = []
        self._changed = trio.Event()
        self._block = host.watching(self._take)
        self._block.__enter__()  # for as long as there is this watch

    def _take(self, event: PeerEvent) -> None:
        self.events.append(event)
        self._changed.set()
        self._changed = trio.Event()

    async def wait(self, peer: PeerId, state: PeerState) -> None:
        while PeerEvent(peer, state) not in self.events:
            await self._changed.wait()


def introduce(one: Host, *others: Host) -> None:
    for other in others:
        one.add_addrs(other.peer_id, other.addrs)


async def stream_pair(one: Host, other: Host, protocol: ProtocolId) -> tuple[Stream, Stream]:
    """A stream from ``one``, and its end at ``other``, open until the host closes."""
    accepted, stays_open = trio.open_memory_channel[Stream](1)

    async def serve(stream: Stream) -> None:
        accepted.send_nowait(stream)
        await trio.sleep_forever()

    other.set_handler(protocol, serve)
    dialled = await one.open_stream(other.peer_id, protocol)
    return dialled, await stays_open.receive()


@law_of("hosts")
async def test_a_request_gets_its_answer_whoever_dialled(h: Hosts) -> None:
    for host in (h.a, h.b):
        host.set_handler(ECHO, serve_requests(echo))
    introduce(h.a, h.b)
    for asker, other in ((h.a, h.b), (h.b, h.a)):  # over one connection
        for data in (b"hello", b"", bytes(MAX_MESSAGE)):
            assert await request(asker, other.peer_id, ECHO, data) == data


@law_of("hosts")
async def test_an_answer_may_come_before_the_question_is_over(h: Hosts) -> None:
    """A peer that has heard enough answers, and closes; the asker was still sending."""

    async def serve(stream: Stream) -> None:
        await stream.receive_some(100)
        await send_frame(stream, b"enough")

    h.b.set_handler(ECHO, serve)
    introduce(h.a, h.b)
    with trio.fail_after(60):
        assert await request(h.a, h.b.peer_id, ECHO, bytes(4 * MAX_MESSAGE)) == b"enough"


@law_of("hosts")
async def test_every_address_names_its_host_and_no_network(h: Hosts) -> None:
    """Limits may count networks; loopback and simulated machines are in none."""
    assert h.b.addrs
    assert all(addr.peer_id == h.b.peer_id for addr in h.b.addrs)
    assert h.a.network_of(h.b.peer_id) == ""
    assert await h.a.connect_addr(h.b.addrs[0]) == h.b.peer_id
    assert h.a.connected == (h.b.peer_id,)
    assert h.a.network_of(h.b.peer_id) == ""


@law_of("hosts")
async def test_somebody_else_at_the_address_is_the_wrong_peer(h: Hosts) -> None:
    with pytest.raises(WrongPeer):
        await h.a.connect_addr(h.b.addrs[0].with_peer(h.c.peer_id))
    assert h.c.peer_id not in h.a.connected


@law_of("hosts")
async def test_who_has_no_address_or_a_dead_one_is_unreachable(h: Hosts) -> None:
    with pytest.raises(PeerUnreachable):
        await h.a.connect(h.stranger.peer_id)
    with pytest.raises(PeerUnreachable):
        await h.a.open_stream(h.stranger.peer_id, ECHO)
    with pytest.raises(PeerUnreachable):
        await h.a.connect_addr(h.nowhere.with_peer(h.stranger.peer_id))


@law_of("hosts")
async def test_a_live_address_is_found_beside_a_dead_one(h: Hosts) -> None:
    introduce(h.a, h.b)
    h.a.add_addrs(h.b.peer_id, [h.nowhere])
    await h.a.connect(h.b.peer_id)
    assert h.a.connected == (h.b.peer_id,)


@law_of("hosts")
async def test_addresses_are_remembered_newest_first_and_with_the_peers_id(h: Hosts) -> None:
    peer = h.b.peer_id
    for addrs in ([addr.transport for addr in h.b.addrs], h.b.addrs):
        h.a.add_addrs(peer, addrs)
        assert h.a.addrs_of(peer) == h.b.addrs
    h.a.add_addrs(peer, [h.nowhere])
    assert h.a.addrs_of(peer) == (h.nowhere.transport.with_peer(peer), *h.b.addrs)
    assert h.a.addrs_of(h.c.peer_id) == ()
    assert await h.a.connect_addr(h.a.addrs_of(peer)[1]) == peer


@law_of("hosts")
async def test_who_is_known_at_no_address_is_looked_for_before_a_dial(h: Hosts) -> None:
    asked: list[PeerId] = []

    async def find(peer: PeerId) -> None:
        asked.append(peer)
        await trio.lowlevel.checkpoint()
        if peer == h.b.peer_id:
            h.a.add_addrs(peer, h.b.addrs)

    h.b.set_handler(ECHO, serve_requests(echo))
    news = Mailbox(h.b)
    with h.a.finding(find):
        assert h.a.send(h.b.peer_id, NEWS, b"where are you")
        assert await request(h.a, h.b.peer_id, ECHO, b"here") == b"here"
        assert await news.wait(1) == [(h.a.peer_id, b"where are you")]
        with pytest.raises(PeerUnreachable):
            await h.a.connect(h.stranger.peer_id)
        assert asked == [h.b.peer_id, h.stranger.peer_id]
        await h.a.disconnect(h.b.peer_id)
        await h.a.connect(h.b.peer_id)
    with pytest.raises(PeerUnreachable):
        await h.a.connect(h.stranger.peer_id)
    assert asked == [h.b.peer_id, h.stranger.peer_id]


@law_of("hosts")
async def test_who_dials_us_while_we_look_for_it_is_connected(h: Hosts) -> None:
    watch = Watch(h.a)

    async def find(peer: PeerId) -> None:
        await h.b.connect_addr(h.a.addrs[0])
        await watch.wait(peer, PeerState.CONNECTED)

    with h.a.finding(find):
        await h.a.connect(h.b.peer_id)
    assert h.a.connected == (h.b.peer_id,)


@law_of("hosts")
async def test_a_protocol_is_served_for_the_length_of_a_block(h: Hosts) -> None:
    introduce(h.a, h.b)
    with pytest.raises(ProtocolNotSupported):
        await h.a.open_stream(h.b.peer_id, ECHO)
    with h.b.serving(ECHO, serve_requests(echo)):
        assert await request(h.a, h.b.peer_id, ECHO, b"hello") == b"hello"
    with pytest.raises((ProtocolNotSupported, trio.BrokenResourceError, BadMessage)):
        await request(h.a, h.b.peer_id, ECHO, b"hello")
    await h.c.connect_addr(h.b.addrs[0])
    with pytest.raises(ProtocolNotSupported):
        await h.c.open_stream(h.b.peer_id, ECHO)
    with h.b.serving(ECHO, serve_requests(echo)):
        assert await request(h.a, h.b.peer_id, ECHO, b"again") == b"again"


@law_of("hosts")
async def test_a_block_that_ends_resets_what_it_was_serving(h: Hosts) -> None:
    """Nothing of a block outlives it, least of all a handler whose session is gone."""
    serving, ended = trio.Event(), trio.Event()

    async def serve(stream: Stream) -> None:
        serving.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    h.b.set_handler(ECHO, serve_requests(echo))
    introduce(h.a, h.b)
    with h.b.serving(NEWS, serve):
        stream = await h.a.open_stream(h.b.peer_id, NEWS)
        await serving.wait()
    with trio.fail_after(10):
        await ended.wait()
        with pytest.raises(trio.BrokenResourceError):
            await read_all(stream)
    assert await request(h.a, h.b.peer_id, ECHO, b"others go on") == b"others go on"


@law_of("hosts")
async def test_a_protocol_has_one_block_at_a_time(h: Hosts) -> None:
    with h.a.serving(ECHO, serve_requests(echo)):
        for second in (h.a.serving(ECHO, serve_requests(echo)), h.a.receiving(ECHO, print)):
            with pytest.raises(ValueError, match="served already"), second:
                pass
    with h.a.receiving(ECHO, print):
        second = h.a.serving(ECHO, serve_requests(echo))
        with pytest.raises(ValueError, match="served already"), second:
            pass
    bad = ProtocolId("bad id")
    for block in (h.a.serving(bad, print), h.a.receiving(bad, print)):
        with pytest.raises(ValueError, match="no protocol id"), block:
            pass
    with h.a.serving(ECHO, serve_requests(echo)):
        pass  # a refused block takes nothing away


@law_of("hosts")
async def test_messages_are_received_for_the_length_of_a_block(h: Hosts) -> None:
    introduce(h.a, h.b)
    heard: list[bytes] = []
    first, probe = trio.Event(), Mailbox(h.b, ECHO)

    def take(peer: PeerId, message: bytes) -> None:
        heard.append(message)
        first.set()

    with h.b.receiving(NEWS, take):
        assert h.a.send(h.b.peer_id, NEWS, b"within")
        await first.wait()
    h.a.send(h.b.peer_id, NEWS, b"after")
    assert h.a.send(h.b.peer_id, ECHO, b"probe")
    await probe.wait(1)
    await trio.testing.wait_all_tasks_blocked()
    assert heard == [b"within"]


@law_of("hosts")
async def test_peers_are_watched_for_the_length_of_a_block(h: Hosts) -> None:
    events: list[PeerEvent] = []
    watch = Watch(h.a)
    with h.a.watching(events.append):
        with h.a.watching(events.append):
            await h.a.connect_addr(h.b.addrs[0])
            await watch.wait(h.b.peer_id, PeerState.CONNECTED)
        assert events == 2 * [PeerEvent(h.b.peer_id, PeerState.CONNECTED)]
        await h.a.disconnect(h.b.peer_id)
        await watch.wait(h.b.peer_id, PeerState.DISCONNECTED)
    assert len(events) == 3
    await h.a.connect_addr(h.b.addrs[0])
    assert len(events) == 3


@law_of("hosts")
async def test_a_stream_knows_its_peer_and_protocol(h: Hosts) -> None:
    introduce(h.a, h.b)
    ours, theirs = await stream_pair(h.a, h.b, ECHO)
    assert (ours.peer, ours.protocol) == (h.b.peer_id, ECHO)
    assert (theirs.peer, theirs.protocol) == (h.a.peer_id, ECHO)


@law_of("hosts")
async def test_streams_keep_trios_rules(h: Hosts) -> None:
    introduce(h.a, h.b)
    count = 0

    async def pair() -> tuple[Stream, Stream]:
        nonlocal count
        count += 1
        return await stream_pair(h.a, h.b, ProtocolId(f"/shoal/test-{count}/1.0.0"))

    async def clogged() -> tuple[Stream, Stream]:
        ends = await pair()

        async def fill(stream: Stream) -> None:
            while True:
                await stream.send_all(bytes(65536))

        async with trio.open_nursery() as nursery:
            for end in ends:
                nursery.start_soon(fill, end)
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.cancel_scope.cancel()
        return ends

    await trio.testing.check_half_closeable_stream(pair, clogged)


@law_of("hosts")
async def test_a_reset_breaks_the_other_side_and_an_exception_resets(h: Hosts) -> None:
    introduce(h.a, h.b)
    ours, theirs = await stream_pair(h.a, h.b, ECHO)
    ours.reset()
    with pytest.raises(trio.BrokenResourceError):
        await theirs.receive_some()
    with pytest.raises(trio.ClosedResourceError):
        await ours.send_all(b"x")
    ours, theirs = await stream_pair(h.a, h.b, NEWS)

    async def leave_midway() -> None:
        async with ours:
            await ours.send_all(b"half of")
            raise KeyError

    with pytest.raises(KeyError):
        await leave_midway()
    with pytest.raises(trio.BrokenResourceError):
        await read_all(theirs)


@law_of("hosts")
async def test_a_sender_waits_for_a_slow_reader_and_loses_nothing(h: Hosts) -> None:
    introduce(h.a, h.b)
    ours, theirs = await stream_pair(h.a, h.b, ECHO)
    sent = 0
    total = 64 * 1024 * 1024

    async def fill() -> None:
        nonlocal sent
        while sent < total:
            await ours.send_all(bytes(262144))
            sent += 262144
        await ours.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert sent < total
        received = 0
        while data := await theirs.receive_some():
            received += len(data)
    assert received == total


@law_of("hosts")
async def test_a_stream_is_drained_when_its_bytes_have_left(h: Hosts) -> None:
    """What the peer holds unread has left this node; what waits for room there has not."""
    introduce(h.a, h.b)
    ours, theirs = await stream_pair(h.a, h.b, ECHO)
    with trio.fail_after(10):
        await ours.drained()
        for size in (1, 1000, 65536):
            await ours.send_all(bytes(size))
            await ours.drained(2**40)
            await ours.drained()
        await ours.send_eof()
        await ours.drained()
        assert len(await read_all(theirs)) == 66537


@law_of("hosts")
async def test_a_stream_is_not_drained_while_another_task_sends_or_once_reset(h: Hosts) -> None:
    introduce(h.a, h.b)
    ours, theirs = await stream_pair(h.a, h.b, ECHO)

    async def fill() -> None:
        while True:
            await ours.send_all(bytes(65536))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fill)
        await trio.testing.wait_all_tasks_blocked(0.05)
        with pytest.raises(trio.BusyResourceError):
            await ours.drained()
        nursery.cancel_scope.cancel()
    with trio.fail_after(10):
        await ours.drained()
    await theirs.receive_some()
    theirs.reset()
    with pytest.raises(trio.BrokenResourceError):
        await ours.receive_some()
    with pytest.raises(trio.BrokenResourceError):
        await ours.drained()
    await ours.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await ours.drained()


@law_of("hosts")
async def test_messages_arrive_once_and_in_order(h: Hosts) -> None:
    introduce(h.a, h.b)
    box = Mailbox(h.b)
    messages = [b"%d" % number * (number % 40) for number in range(2000)]
    for message in messages:
        assert h.a.send(h.b.peer_id, NEWS, message)
    assert await box.wait(len(messages)) == [(h.a.peer_id, message) for message in messages]


@law_of("hosts")
async def test_messages_go_both_ways_and_by_protocol(h: Hosts) -> None:
    introduce(h.a, h.b)
    at_a, at_b, other_at_b = Mailbox(h.a), Mailbox(h.b), Mailbox(h.b, ECHO)
    assert h.a.send(h.b.peer_id, NEWS, b"to b")
    assert h.a.send(h.b.peer_id, ECHO, b"other")
    await at_b.wait(1)
    assert h.b.send(h.a.peer_id, NEWS, b"to a")
    assert await at_a.wait(1) == [(h.b.peer_id, b"to a")]
    assert await other_at_b.wait(1) == [(h.a.peer_id, b"other")]
    assert at_b.received == [(h.a.peer_id, b"to b")]


@law_of("hosts")
async def test_messages_find_a_peer_again_that_was_disconnected(h: Hosts) -> None:
    introduce(h.a, h.b)
    box, watch = Mailbox(h.b), Watch(h.b)
    h.a.send(h.b.peer_id, NEWS, b"first")
    await box.wait(1)
    await h.a.disconnect(h.b.peer_id)
    await watch.wait(h.a.peer_id, PeerState.DISCONNECTED)
    assert h.a.send(h.b.peer_id, NEWS, b"second")
    assert (await box.wait(2))[1] == (h.a.peer_id, b"second")


@law_of("hosts")
async def test_a_message_to_nobody_is_reported(h: Hosts) -> None:
    watch = Watch(h.a)
    assert h.a.send(h.stranger.peer_id, NEWS, b"hello?")
    await watch.wait(h.stranger.peer_id, PeerState.UNREACHABLE)
    assert h.stranger.peer_id not in h.a.connected


@law_of("hosts")
async def test_an_outbox_is_bounded(h: Hosts) -> None:
    introduce(h.a, h.b)
    Mailbox(h.b)
    message = bytes(MAX_MESSAGE // 2)
    taken = [
        h.a.send(h.b.peer_id, NEWS, message) for _ in range(2 * MAX_OUTBOX // len(message))
    ]
    assert taken[0]
    assert not taken[-1]
    assert sum(taken) * len(message) <= MAX_OUTBOX


@law_of("hosts")
async def test_a_message_beyond_the_limit_is_our_own_bug(h: Hosts) -> None:
    introduce(h.a, h.b)
    with pytest.raises(LocalProtocolError):
        h.a.send(h.b.peer_id, NEWS, bytes(MAX_MESSAGE + 1))


@law_of("hosts")
async def test_coming_and_going_is_told_once_on_both_sides(h: Hosts) -> None:
    at_a, at_b = Watch(h.a), Watch(h.b)
    await h.a.connect_addr(h.b.addrs[0])
    await h.a.connect(h.b.peer_id)
    await at_b.wait(h.a.peer_id, PeerState.CONNECTED)
    assert h.b.connected == (h.a.peer_id,)
    await h.a.disconnect(h.b.peer_id)
    await at_b.wait(h.a.peer_id, PeerState.DISCONNECTED)
    await trio.testing.wait_all_tasks_blocked()
    assert h.a.connected == h.b.connected == ()
    states = [PeerState.CONNECTED, PeerState.DISCONNECTED]
    assert at_a.events == [PeerEvent(h.b.peer_id, state) for state in states]
    assert at_b.events == [PeerEvent(h.a.peer_id, state) for state in states]


@law_of("hosts")
async def test_disconnecting_breaks_the_streams(h: Hosts) -> None:
    introduce(h.a, h.b)
    ours, theirs = await stream_pair(h.a, h.b, ECHO)
    await h.b.disconnect(h.a.peer_id)
    with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
        await theirs.receive_some()
    with pytest.raises(trio.BrokenResourceError):
        await ours.receive_some()


@law_of("hosts")
async def test_many_callers_share_one_dial(h: Hosts) -> None:
    introduce(h.a, h.b)
    watch = Watch(h.b)
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(h.a.connect, h.b.peer_id)
    await watch.wait(h.a.peer_id, PeerState.CONNECTED)
    assert len(watch.events) == 1


@law_of("hosts")
async def test_dialling_each_other_at_once_works(h: Hosts) -> None:
    for host in (h.a, h.b):
        host.set_handler(ECHO, serve_requests(echo))
    introduce(h.a, h.b)
    introduce(h.b, h.a)
    watch = Watch(h.a)
    answers = []

    async def ask(one: Host, other: Host) -> None:
        answers.append(await request(one, other.peer_id, ECHO, b"you?"))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask, h.a, h.b)
            nursery.start_soon(ask, h.b, h.a)
    assert answers == [b"you?"] * 10
    assert watch.events == [PeerEvent(h.b.peer_id, PeerState.CONNECTED)]


@law_of("hosts")
async def test_a_banned_peer_is_gone_and_stays_out(h: Hosts) -> None:
    introduce(h.a, h.b)
    introduce(h.b, h.a)
    watch = Watch(h.b)
    await h.a.connect(h.b.peer_id)
    await watch.wait(h.a.peer_id, PeerState.CONNECTED)
    h.a.ban(h.b.peer_id)
    await watch.wait(h.a.peer_id, PeerState.DISCONNECTED)
    with pytest.raises(PeerUnreachable):
        await h.a.connect(h.b.peer_id)
    assert not h.a.send(h.b.peer_id, NEWS, b"x")
    h.a.set_handler(ECHO, serve_requests(echo))
    # from b's side too: refused after the handshake at the latest
    with pytest.raises(PeerUnreachable):
        await request(h.b, h.a.peer_id, ECHO, b"x")
    assert h.b.peer_id not in h.a.connected


@law_of("hosts")
async def test_penalty_points_add_up_to_a_refusal(h: Hosts) -> None:
    introduce(h.a, h.b, h.c)
    watch = Watch(h.a)
    h.a.penalise(h.c.peer_id, 100.0, "before it was ever dialled")
    await h.a.connect(h.b.peer_id)
    h.a.penalise(h.b.peer_id, 60.0, "rude")
    await h.a.connect(h.b.peer_id)
    assert h.a.connected == (h.b.peer_id,)
    h.a.penalise(h.b.peer_id, 60.0, "rude again")
    await watch.wait(h.b.peer_id, PeerState.DISCONNECTED)
    watch.events.clear()
    for peer in (h.b.peer_id, h.c.peer_id):
        with pytest.raises(PeerUnreachable, match="refused"):
            await h.a.connect(peer)
        assert not h.a.send(peer, NEWS, b"x")
    await trio.testing.wait_all_tasks_blocked()
    assert watch.events == []


@law_of("hosts")
async def test_a_bad_message_costs_the_connection(h: Hosts) -> None:
    introduce(h.a, h.b)
    watch = Watch(h.b)

    def refuse(peer: PeerId, message: bytes) -> None:
        raise BadMessage("not this")

    with h.b.receiving(NEWS, refuse):
        h.a.send(h.b.peer_id, NEWS, b"x")
        await watch.wait(h.a.peer_id, PeerState.DISCONNECTED)
        h.a.send(h.b.peer_id, NEWS, b"x")
        await watch.wait(h.a.peer_id, PeerState.CONNECTED)


@law_of("hosts")
async def test_an_answer_that_is_none_is_a_bad_message(h: Hosts) -> None:
    async def silent(stream: Stream) -> None:
        await stream.receive_some()

    async def too_long(stream: Stream) -> None:
        await send_frame(stream, bytes(100))

    introduce(h.a, h.b)
    for handler in (silent, too_long):
        with h.b.serving(ECHO, handler), pytest.raises(BadMessage):
            await request(h.a, h.b.peer_id, ECHO, b"x", max_reply=99)


@law_of("hosts")
async def test_hearsay_comes_after_what_is_certain(h: Hosts) -> None:
    places = [addr.transport for addr in h.b.addrs]
    h.a.add_addrs(h.stranger.peer_id, places, AddrSource.OWNER)
    h.a.add_addrs(h.stranger.peer_id, [h.nowhere], AddrSource.HEARSAY)
    known = [addr.transport for addr in h.a.addrs_of(h.stranger.peer_id)]
    assert known == [*places, h.nowhere.transport]
    h.a.add_addrs(h.stranger.peer_id, [h.nowhere], AddrSource.SIGNED)
    known = [addr.transport for addr in h.a.addrs_of(h.stranger.peer_id)]
    assert known == [h.nowhere.transport, *places]


@law_of("hosts")
async def test_names_are_taken_from_the_owner_only(h: Hosts) -> None:
    name = Multiaddr.parse("/dns4/example.org/tcp/1")
    for source in (AddrSource.SIGNED, AddrSource.HEARSAY):
        h.a.add_addrs(h.stranger.peer_id, [name], source)
        assert h.a.addrs_of(h.stranger.peer_id) == ()
    h.a.add_addrs(h.stranger.peer_id, [name], AddrSource.OWNER)
    assert [addr.transport for addr in h.a.addrs_of(h.stranger.peer_id)] == [name]


@law_of("hosts")
async def test_a_message_beyond_the_protocols_limit_costs_the_connection(h: Hosts) -> None:
    introduce(h.a, h.b)
    watch = Watch(h.b)
    received = []
    with h.b.receiving(NEWS, lambda _, message: received.append(message), max_message=100):
        h.a.send(h.b.peer_id, NEWS, bytes(100))
        h.a.send(h.b.peer_id, NEWS, bytes(101))
        await watch.wait(h.a.peer_id, PeerState.DISCONNECTED)
        assert received == [bytes(100)]


@law_of("hosts")
async def test_a_peer_that_did_not_answer_is_left_alone_until_there_is_news(h: Hosts) -> None:
    """Messages are dropped at once for a while; who waits for its own `connect` tries anew."""
    peer = h.stranger.peer_id
    watch = Watch(h.a)
    h.a.add_addrs(peer, [h.nowhere])
    assert h.a.send(peer, NEWS, b"dials")
    await watch.wait(peer, PeerState.UNREACHABLE)
    assert not h.a.send(peer, NEWS, b"dropped")
    h.a.add_addrs(peer, [h.nowhere])
    assert not h.a.send(peer, NEWS, b"that was no news")
    with pytest.raises(PeerUnreachable):
        await h.a.connect(peer)
    h.a.add_addrs(peer, [h.b.addrs[0].transport], AddrSource.SIGNED)
    assert h.a.send(peer, NEWS, b"dials again")


@law_of("hosts")
async def test_a_peer_that_dials_us_is_worth_a_message_again(h: Hosts) -> None:
    watch, box = Watch(h.a), Mailbox(h.b)
    h.a.add_addrs(h.b.peer_id, [h.nowhere])
    h.a.send(h.b.peer_id, NEWS, b"lost")
    await watch.wait(h.b.peer_id, PeerState.UNREACHABLE)
    assert not h.a.send(h.b.peer_id, NEWS, b"dropped")
    introduce(h.b, h.a)
    await h.b.connect(h.a.peer_id)
    await watch.wait(h.b.peer_id, PeerState.CONNECTED)
    assert h.a.send(h.b.peer_id, NEWS, b"said")
    assert await box.wait(1) == [(h.a.peer_id, b"said")]


@law_of("hosts")
async def test_no_host_dials_itself(h: Hosts) -> None:
    for source in AddrSource:
        h.a.add_addrs(h.a.peer_id, h.a.addrs, source)
    assert h.a.addrs_of(h.a.peer_id) == ()
    assert not h.a.send(h.a.peer_id, NEWS, b"echo")
    with pytest.raises(PeerUnreachable):
        await h.a.connect(h.a.peer_id)
