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
    found = await stagger(addrs, attempt, DIAL_FAILURES)
    if isinstance(found, tuple):
        return found
    for error, _ in found:
        if isinstance(error, WrongPeer):
            raise error
    reasons = [
        str(error if isinstance(error, ShoalError) else f"{addr}: {error or 'too slow'}")[:120]
        for error, addr in found[:2]
    ]
    if len(found) > 2:  # a person mends one at a time, the surest ones
        reasons.append(f"and {len(found) - 2} more addresses")
    raise PeerUnreachable(f"{peer} cannot be reached: {'; '.join(reasons)}")


async def stagger(
    places: Sequence[T],
    attempt: Callable[[T], Awaitable[D]],
    failures: tuple[type[Exception], ...],
) -> tuple[D, T] | list[tuple[Exception, T]]:
    """Return the first success of ``attempt`` with its place, or the error of each place if all
    fail with one of ``failures``.

    Each attempt starts a quarter of a second after the one before (recommended by RFC 8305), or
    at once after a failure, at most four at a time: two families, inside and outside. 32 dials
    take 128 sockets.
    """
    won: list[tuple[D, T]] = []
    errors: list[tuple[Exception, T]] = []
    slots = trio.CapacityLimiter(4)

    async def try_one(place: T) -> None:
        try:
            won.append((await attempt(place), place))
        except failures as error:
            errors.append((error, place))

    async def take_turn(place: T, failed: trio.Event) -> None:
        async with slots:
            await try_one(place)
            if won:
                nursery.cancel_scope.cancel()
        failed.set()

    try:
        if len(places) == 1:
            await try_one(places[0])
        else:
            async with trio.open_nursery() as nursery:
                for place in places:
                    failed = trio.Event()
                    nursery.start_soon(take_turn, place, failed)
                    with trio.move_on_after(0.25):
                        await failed.wait()
    except BaseException:
        for late, _ in won:
            await trio.aclose_forcefully(late)
        raise
    for late, _ in won[1:]:  # finished in the same tick
        await trio.aclose_forcefully(late)
    return won[0] if won else errors
