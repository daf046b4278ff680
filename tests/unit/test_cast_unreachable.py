"""What a puller is told while no address of its ticket answers."""

from __future__ import annotations

from types import SimpleNamespace

import trio
import trio.testing

from p2p.cast.puller import tell_unreachable
from p2p.multiaddr import Multiaddr


def test_eight_silent_addresses_are_named_after_one_timeout() -> None:
    """They were looked at one after the other: the last was named after 80 seconds."""
    addrs = [Multiaddr.tcp("192.0.2.1", port) for port in range(1, 9)]
    named: dict[str, float] = {}
    clock = trio.testing.MockClock(autojump_threshold=0)

    async def connect_addr(_: Multiaddr) -> None:
        await trio.sleep_forever()

    def event(kind: str, _: str, *, addr: str, cause: str) -> None:
        assert kind == "unreachable"
        assert cause
        named[addr] = clock.current_time()

    node = SimpleNamespace(
        host=SimpleNamespace(connect_addr=connect_addr),
        membership=SimpleNamespace(neighbours=(), wait_neighbour=trio.sleep_forever),
    )

    async def wait_a_minute() -> None:
        with trio.move_on_after(60):
            await tell_unreachable(node, addrs, SimpleNamespace(event=event), {})

    trio.run(wait_a_minute, clock=clock)
    assert len(named) == 8
    assert set(named.values()) == {10.0}
