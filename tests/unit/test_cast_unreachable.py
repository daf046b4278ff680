"""What a puller reads of a ticket's addresses that do not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import trio
import trio.testing

from p2p.cast.commands.unreachable import ROUND, TIMEOUT, tell_unreachable
from p2p.cast.ticket import MAX_ADDRS
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr
from p2p.swarm import open_host
from p2p.transport.memory import MemoryNetwork

PUSHER = KeyPair(b"\1" * 32).peer_id


class SilentNetwork(MemoryNetwork):
    """Firewalls that swallow every packet."""

    async def dial(self, addr: Multiaddr) -> Any:
        await trio.sleep_forever()


class Said:
    """A `Teller` that keeps when which address was named."""

    def __init__(self, clock: trio.testing.MockClock) -> None:
        self._clock = clock
        self.times: dict[str, list[float]] = {}

    def event(self, kind: str, text: str, **fields: object) -> None:
        assert kind == "unreachable"
        assert str(fields["addr"]) in text
        self.times.setdefault(str(fields["addr"]), []).append(self._clock.current_time())


async def test_silent_addresses_are_named_together(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The eighth was named when the seven before it had been waited for, one by one."""
    addrs = [
        Multiaddr.tcp("192.0.2.7", 4001 + number).with_peer(PUSHER)
        for number in range(MAX_ADDRS)
    ]
    said, start = Said(autojump_clock), autojump_clock.current_time()
    async with open_host(network=SilentNetwork(), listen=()) as host:
        membership = SimpleNamespace(neighbours=(), wait_neighbour=trio.sleep_forever)
        node = cast(Any, SimpleNamespace(host=host, membership=membership))
        with trio.move_on_after(3 * (TIMEOUT + ROUND)):
            await tell_unreachable(node, addrs, cast(Any, said))
    assert {str(addr.transport) for addr in addrs} == set(said.times)
    assert max(times[0] for times in said.times.values()) - start <= TIMEOUT
    assert all(len(times) <= 2 for times in said.times.values())  # no line a round
