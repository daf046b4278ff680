"""How pullers stay with their pusher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import trio
import trio.testing

from p2p.cast.pusher import _machine
from p2p.cast.swarm import _stay_with
from p2p.errors import PeerUnreachable
from p2p.host import PeerEvent, PeerState
from p2p.identity import KeyPair, PeerId
from p2p.membership import Member
from p2p.membership.heartbeat import Profile
from p2p.multiaddr import Multiaddr

PUSHER = KeyPair(bytes(32)).peer_id
TICKET = Multiaddr.parse("/ip4/203.0.113.7/tcp/4001")


async def sleep(seconds: float) -> None:
    with trio.move_on_after(seconds):
        await trio.sleep_forever()


class Host:
    """A host whose connections to the pusher last so many seconds; 0: it closes them at once,
    below 0: it does not answer."""

    def __init__(self, lasts: float, nursery: trio.Nursery, now: Callable[[], float]) -> None:
        self.lasts = lasts
        self.connected: tuple[PeerId, ...] = ()
        self.known: dict[PeerId, tuple[Multiaddr, ...]] = {}
        self.dials: list[float] = []
        self._nursery = nursery
        self._now = now
        self._watcher: Callable[[PeerEvent], None] = lambda _: None

    @contextmanager
    def watching(self, watcher: Callable[[PeerEvent], None]) -> Iterator[None]:
        self._watcher = watcher
        yield

    def add_addrs(self, peer: PeerId, addrs: Sequence[Multiaddr]) -> None:
        self.known[peer] = tuple(addrs)

    async def connect(self, peer: PeerId) -> None:
        assert self.known == {peer: (TICKET,)}, "an address that the host has forgotten"
        self.known.clear()  # another node has answered there
        self.dials.append(self._now())
        if self.lasts < 0:
            raise PeerUnreachable(f"{peer} does not answer")
        self.connected = (peer,)
        self._watcher(PeerEvent(peer, PeerState.CONNECTED))
        self._nursery.start_soon(self._close)

    async def _close(self) -> None:
        await sleep(self.lasts)
        peer, self.connected = self.connected[0], ()
        self._watcher(PeerEvent(peer, PeerState.DISCONNECTED))


def dials_in(seconds: float, *lasts: float) -> tuple[list[float], int]:
    """When a puller dials a pusher whose connections last ``lasts``, one value for each
    ``seconds``; how often heartbeats to it were asked for."""
    asked = []
    clock = trio.testing.MockClock(autojump_threshold=0)

    async def main() -> Host:
        async with trio.open_nursery() as nursery:
            host = Host(lasts[0], nursery, clock.current_time)
            node = SimpleNamespace(
                host=host,
                world=SimpleNamespace(sleep=sleep, now=clock.current_time),
                membership=SimpleNamespace(interest=lambda *_, **__: asked.append(1)),
            )
            nursery.start_soon(_stay_with, node, PUSHER, [TICKET])
            for each in lasts:
                host.lasts = each
                await sleep(seconds)
            nursery.cancel_scope.cancel()
        return host

    host = trio.run(main, clock=clock)
    start = host.dials[0] - 1
    return [when - start for when in host.dials], len(asked)


def test_a_pusher_that_is_gone_is_dialled_every_sixteen_seconds_at_last() -> None:
    dials, _ = dials_in(100, -1)
    assert dials == [1, 3, 7, 15, 31, 47, 63, 79, 95]


def test_one_that_closes_each_connection_is_not_dialled_more_often() -> None:
    """It has no room: a thousand pullers that came back after a second would keep it busy with
    handshakes."""
    dials, asked = dials_in(100, 0)
    assert dials == [1, 3, 7, 15, 31, 47, 63, 79, 95]
    assert asked == 1 + len(dials)


def test_after_a_connection_that_lasted_it_is_dialled_at_once() -> None:
    dials, _ = dials_in(100, -1, 60)
    assert dials[-2:] == [111, 172]


def test_no_puller_takes_the_place_of_all_bars_by_the_name_of_its_host() -> None:
    for addrs in ((), (Multiaddr.parse(f"/dns4/{'a.' * 126}/tcp/1"),)):
        assert len(_machine(Member(PUSHER, Profile(addrs=addrs), 0.0))) <= 40
