"""``python -m bench.hostile.strangers``: strangers that send a trainer windows.

Nothing that they send took work. Options are JSON on the command line (`Orders`); the newest
policy's number and digest come by standard input, a line each time. Loopback only: `Target`
refuses other hosts.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from typing import Final

import trio

from bench.hostile.raw import TROUBLE, Target, pause
from p2p.host import Host
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr
from p2p.shardcast.manifest import PolicyVersion
from p2p.swarm.swarm import open_host
from p2p.wire import frame
from roles.protocol.core.answer import MAX_ANSWER, WORK_PROTOCOL, WindowRequest, encode_request
from roles.protocol.core.window import Claim, SignedWindow, Window, content_digest

JUNK: Final = b"\xc1junk"
"""Content that is no list of groups: nobody ever asks for it."""
FAR: Final = 1_000_000
"""Places, or policies, ahead of all that exist."""
READ_SECONDS: Final = 2.0
"""Seconds to wait for an answer; the next window goes out meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Orders for the strangers."""

    addr: str
    run: str
    terms: str
    groups: int = 4
    """Groups of a place."""
    kind: str = "mixed"
    strangers: int = 100
    bytes_per_second: float = 50_000.0
    seed: int = 1

    def to_json(self) -> str:
        """Return the orders for the command line."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Stranger:
    """One identity, and what it has sent."""

    key: KeyPair
    orders: Orders
    policy: bytes = bytes(32)
    count: int = 0

    def window(
        self,
        version: int,
        first: int,
        *,
        places: int = 1,
        content: bytes = JUNK,
        terms: str = "",
    ) -> bytes:
        """Return a signed window in a frame."""
        self.count += 1
        window = Window(
            run=bytes.fromhex(self.orders.run),
            terms=bytes.fromhex(terms or self.orders.terms),
            node=self.key.peer_id,
            version=PolicyVersion(version),
            policy=self.policy,
            first=first,
            contents=(content_digest(content),) * places,
            claims=bytes([Claim.SPREAD]) * self.orders.groups * places,
        )
        signed = SignedWindow.sign(window, self.key)
        return frame(encode_request(WindowRequest(signed)))


Forge = Callable[[Stranger, int, Random], bytes]


def in_order(of: Stranger, newest: int, _: Random) -> bytes:
    """Return the next place under the newest policy. The trainer takes it up to its limit."""
    return of.window(newest, of.count)


def longest(of: Stranger, newest: int, _: Random) -> bytes:
    """Return the same window each time, with as many places as fit."""
    return of.window(newest, 0, places=16)


def at_once(of: Stranger, newest: int, rng: Random) -> bytes:
    """Return the same place each time, with other content."""
    return of.window(newest, 0, content=rng.randbytes(8))


def ahead(of: Stranger, newest: int, _: Random) -> bytes:
    """Return a place far beyond those that the run can fill."""
    return of.window(newest, FAR + of.count)


def question(of: Stranger, newest: int, _: Random) -> bytes:
    """Return a window without places, which asks how much the trainer wants."""
    return of.window(newest, 0, places=0)


def to_come(of: Stranger, newest: int, _: Random) -> bytes:
    """Return a place under a future policy."""
    return of.window(newest + FAR, of.count)


def stale(of: Stranger, _: int, __: Random) -> bytes:
    """Return a place under the first policy."""
    return of.window(0, of.count)


def other_terms(of: Stranger, newest: int, rng: Random) -> bytes:
    """Return a place under terms that nobody signed."""
    return of.window(newest, of.count, terms=rng.randbytes(32).hex())


def half(of: Stranger, newest: int, _: Random) -> bytes:
    """Return the beginning of a request, cut off within it."""
    return of.window(newest, of.count)[:120]


def unsigned(of: Stranger, newest: int, _: Random) -> bytes:
    """Return a window with an invalid signature."""
    whole = bytearray(of.window(newest, of.count))
    at = len(whole) - 20  # within the signature: a stamp of no bytes follows
    whole[at] ^= 1
    return bytes(whole)


FORGES: Final[dict[str, Forge]] = {
    "in-order": in_order,
    "longest": longest,
    "at-once": at_once,
    "ahead": ahead,
    "question": question,
    "to-come": to_come,
    "stale": stale,
    "other-terms": other_terms,
    "half": half,
    "unsigned": unsigned,
}
MIXED: Final = tuple(name for name in FORGES if name not in ("half", "unsigned"))
"""Kinds that ``mixed`` takes in turn: those that no penalty ends."""
KINDS: Final = ("mixed", "minted", *FORGES)
"""``minted`` is ``in-order`` by another identity, on another connection, each time."""


class Crowd:
    """All strangers, in one process."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._target = Target.parse(orders.addr)
        self._rng = Random(orders.seed)
        self._newest, self._policy = 0, bytes(32)
        self.tally: Counter[str] = Counter()

    def _stranger(self) -> Stranger:
        return Stranger(KeyPair(self._rng.randbytes(32)), self._orders)

    async def listen(self) -> None:
        """Take the newest policy from standard input until it ends."""
        pipe = trio.wrap_file(sys.stdin)
        while line := await pipe.readline():
            number, _, digest = line.strip().partition(" ")
            self._newest, self._policy = int(number), bytes.fromhex(digest)

    async def attack(self) -> None:
        """Attack until cancelled."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._orders.strangers):
                nursery.start_soon(self._live)

    async def _live(self) -> None:
        await pause(self._rng.random())
        while True:
            stranger = self._stranger()
            try:
                async with open_host(key=stranger.key, listen=()) as host:
                    await host.connect_addr(Multiaddr.parse(self._orders.addr))
                    self.tally["connections"] += 1
                    await self._talk(host, stranger)
            except* TROUBLE as group:
                self.tally[type(group.exceptions[0]).__name__] += 1
            await pause(0.5)

    async def _talk(self, host: Host, stranger: Stranger) -> None:
        orders, kind = self._orders, self._orders.kind
        async with trio.open_nursery() as nursery:
            while True:
                name = MIXED[stranger.count % len(MIXED)] if kind == "mixed" else kind
                forge = FORGES["in-order" if kind == "minted" else name]
                stranger.policy = self._policy
                data = forge(stranger, self._newest, self._rng)
                self.tally["windows"] += 1
                self.tally["bytes"] += len(data)
                nursery.start_soon(self._hand_in, host, data)
                share = orders.bytes_per_second / orders.strangers
                await pause(len(data) / share * self._rng.uniform(0.5, 1.5))
                if kind == "minted":
                    nursery.cancel_scope.cancel()

    async def _hand_in(self, host: Host, data: bytes) -> None:
        try:
            with trio.move_on_after(READ_SECONDS):
                async with await host.open_stream(self._target.peer, WORK_PROTOCOL) as stream:
                    await stream.send_all(data)
                    answer = await stream.receive_some(MAX_ANSWER)
                    self.tally["answers" if answer else "ended"] += 1
                    return
            self.tally["no answer"] += 1
        except* TROUBLE as group:
            self.tally[type(group.exceptions[0]).__name__] += 1


async def _run(crowd: Crowd) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(crowd.attack)
        await crowd.listen()
        # before a thousand streams are closed, which takes a while
        sys.stdout.write(json.dumps(dict(crowd.tally)) + "\n")
        sys.stdout.flush()
        nursery.cancel_scope.cancel()


def main(arguments: list[str]) -> int:
    """Attack until standard input ends, then print counts."""
    trio.run(_run, Crowd(Orders(**json.loads(arguments[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
