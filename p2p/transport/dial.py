"""Dialling one peer at several addresses: staggered; the first that proves its name wins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import trio

from p2p.errors import (
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    ShoalError,
    WrongPeer,
)
from p2p.identity import PeerId
from p2p.multiaddr import Multiaddr

STAGGER: Final = 0.25
"""Seconds that an address may stay silent before the next is tried beside it (recommended by
RFC 8305)."""
AT_ONCE: Final = 4
"""Most addresses of one peer tried at the same time: two families, inside and outside. 32 dials
take 128 sockets."""

MAX_NAMED: Final = 2
"""Most addresses that an error message names: the surest two. A person mends one at a time."""
MAX_REASON: Final = 120
"""Most characters of the reason given for one address."""

DIAL_FAILURES: Final = (
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    trio.BrokenResourceError,
    trio.TooSlowError,
)
"""Errors of a dial in which nobody, or another peer, answers at one address."""

D = TypeVar("D", bound=trio.abc.AsyncResource)
T = TypeVar("T")


async def race(
    peer: PeerId, addrs: Sequence[Multiaddr], attempt: Callable[[Multiaddr], Awaitable[D]]
) -> tuple[D, Multiaddr]:
    """Return the first success of ``attempt`` and its address. The caller sets the deadline.

    Raises:
        WrongPeer: Another peer answered at an address, and the peer at none.
        PeerUnreachable: Nobody answered.
    """
    if not addrs:
        raise PeerUnreachable(f"no address of {peer} is known")
    won: list[tuple[D, Multiaddr]] = []
    errors: list[Exception] = []

    async def try_addr(addr: Multiaddr) -> bool:
        try:
            won.append((await attempt(addr), addr))
        except DIAL_FAILURES as error:
            is_ours = isinstance(error, ShoalError)
            errors.append(
                error if is_ours else PeerUnreachable(f"{addr}: {error or 'too slow'}")
            )
            return False
        return True

    try:
        await stagger(addrs, try_addr)
    except BaseException:
        for late, _ in won:
            await trio.aclose_forcefully(late)
        raise
    for late, _ in won[1:]:  # finished in the same tick
        await trio.aclose_forcefully(late)
    if won:
        return won[0]
    wrong = [error for error in errors if isinstance(error, WrongPeer)]
    if wrong:
        raise wrong[0]
    reasons = [f"{error!s:.{MAX_REASON}}" for error in errors[:MAX_NAMED]]
    if len(errors) > MAX_NAMED:
        reasons.append(f"and {len(errors) - MAX_NAMED} more addresses")
    raise PeerUnreachable(f"{peer} cannot be reached: {'; '.join(reasons)}")


async def stagger(places: Sequence[T], attempt: Callable[[T], Awaitable[bool]]) -> None:
    """Call ``attempt`` for all places until one returns True. Each starts a `STAGGER` after the
    one before, or at once after a failure, at most `AT_ONCE` at a time."""
    if len(places) == 1:
        await attempt(places[0])
        return
    slots = trio.CapacityLimiter(AT_ONCE)

    async def try_one(place: T, failed: trio.Event) -> None:
        async with slots:
            if await attempt(place):
                nursery.cancel_scope.cancel()
        failed.set()

    async with trio.open_nursery() as nursery:
        for place in places:
            failed = trio.Event()
            nursery.start_soon(try_one, place, failed)
            with trio.move_on_after(STAGGER):
                await failed.wait()
