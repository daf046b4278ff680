"""``python -m tests.attacks.strangers``: strangers that hand a validator heads of submissions,
and nothing that took work. Options are JSON on the command line (`Orders`); the newest policy's
number comes by standard input, a line each time.

Loopback only: `Target` refuses other hosts.
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

from p2p.host import Host
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr
from p2p.shardcast.manifest import PolicyVersion
from p2p.swarm.swarm import open_host
from p2p.wire import MIB, frame
from roles.protocol.core.groups import (
    MAX_REPLY,
    OFFER_PROTOCOL,
    Commitment,
    Submission,
    content_digest,
)
from tests.attacks.raw import TROUBLE, Target, pause

JUNK: Final = b"\xc1junk"
"""A content that is no list of groups."""
FAR: Final = 1_000_000
"""Places, or policies, ahead of all that exist."""
READ_SECONDS: Final = 2.0
"""How long an answer is waited for: the next head goes out meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the strangers do."""

    addr: str
    run: str
    kind: str = "mixed"
    strangers: int = 100
    bytes_per_second: float = 50_000.0
    seed: int = 1

    def to_json(self) -> str:
        """As the command line takes it."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Stranger:
    """One identity, and what it has said so far."""

    key: KeyPair
    run: bytes
    count: int = 0

    def head(
        self, version: int, index: int, content: bytes = JUNK, claimed: int | None = None
    ) -> bytes:
        """A signed submission, framed; with ``claimed`` only its head, and a length that is a
        lie."""
        self.count += 1
        commitment = Commitment(
            self.run, self.key.peer_id, PolicyVersion(version), bytes(32), index,
            content_digest(content),
        )  # fmt: skip
        whole = Submission.sign(commitment, content, self.key).to_bytes()
        if claimed is None:
            return frame(whole)
        stub = frame(Submission.sign(commitment, bytes(claimed), self.key).to_bytes())
        return stub[: len(stub) - claimed]


Forge = Callable[[Stranger, int, Random], bytes]


def in_order(of: Stranger, newest: int, _: Random) -> bytes:
    """The next place under the newest policy, with a content that is none."""
    return of.head(newest, of.count)


def at_once(of: Stranger, newest: int, rng: Random) -> bytes:
    """A place of the window, again and again, each time with another content."""
    return of.head(newest, of.count % 8, rng.randbytes(8))


def ahead(of: Stranger, newest: int, _: Random) -> bytes:
    """A place far beyond all that can be filled."""
    return of.head(newest, FAR + of.count)


def again(of: Stranger, newest: int, _: Random) -> bytes:
    """The same submission."""
    return of.head(newest, 0)


def to_come(of: Stranger, newest: int, _: Random) -> bytes:
    """Work under a policy that nobody has made."""
    return of.head(newest + FAR, of.count)


def stale(of: Stranger, _: int, __: Random) -> bytes:
    """Work under the first policy."""
    return of.head(0, of.count)


def too_long(of: Stranger, newest: int, _: Random) -> bytes:
    """A head that claims eight megabytes, of which none come."""
    return of.head(newest, of.count, claimed=8 * MIB - 400)


def half(of: Stranger, newest: int, _: Random) -> bytes:
    """The first half of a head."""
    return of.head(newest, of.count)[:120]


def unsigned(of: Stranger, newest: int, rng: Random) -> bytes:
    """A head whose signature is none."""
    whole = bytearray(of.head(newest, of.count))
    for at in range(len(whole) - len(JUNK) - 70, len(whole) - len(JUNK) - 10):
        whole[at] = rng.randrange(256)
    return bytes(whole)


FORGES: Final[dict[str, Forge]] = {
    "in-order": in_order,
    "at-once": at_once,
    "ahead": ahead,
    "again": again,
    "to-come": to_come,
    "stale": stale,
    "too-long": too_long,
    "half": half,
    "unsigned": unsigned,
}
MIXED: Final = ("in-order", "at-once", "ahead", "again", "to-come", "stale", "too-long")
"""What ``mixed`` takes in turn: all that a penalty does not end."""
KINDS: Final = ("mixed", "minted", *FORGES)
"""``minted`` is ``in-order`` by another identity, on another connection, each time."""


class Crowd:
    """All strangers, in one process."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._target = Target.parse(orders.addr)
        self._rng = Random(orders.seed)
        self._newest = 0
        self.tally: Counter[str] = Counter()

    def _stranger(self) -> Stranger:
        return Stranger(KeyPair(self._rng.randbytes(32)), bytes.fromhex(self._orders.run))

    async def listen(self) -> None:
        """Take the newest policy's number from standard input until it ends."""
        pipe = trio.wrap_file(sys.stdin)
        while line := await pipe.readline():
            self._newest = int(line)

    async def attack(self) -> None:
        """Until cancelled."""
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
                data = forge(stranger, self._newest, self._rng)
                self.tally["heads"] += 1
                self.tally["bytes"] += len(data)
                nursery.start_soon(self._hand_in, host, data)
                share = orders.bytes_per_second / orders.strangers
                await pause(len(data) / share * self._rng.uniform(0.5, 1.5))
                if kind == "minted":
                    nursery.cancel_scope.cancel()

    async def _hand_in(self, host: Host, data: bytes) -> None:
        try:
            with trio.move_on_after(READ_SECONDS):
                async with await host.open_stream(self._target.peer, OFFER_PROTOCOL) as stream:
                    await stream.send_all(data)
                    answer = await stream.receive_some(MAX_REPLY)
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
    """Attack until standard input ends; says then what was done."""
    trio.run(_run, Crowd(Orders(**json.loads(arguments[0]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
