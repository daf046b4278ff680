"""Run files with good signatures and hostile contents, handed over by a peer that has
joined.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from p2p.errors import BadMessage, PeerUnreachable
from p2p.host import Host, serve_requests
from p2p.identity import KeyPair, PeerId, Verify, verify
from p2p.machine import RealWorld
from p2p.node.admission import OtherRun, SignedRun
from p2p.node.node import Node, run_roles
from p2p.node.rundoc import PROTOCOL_ID, RunBook, RunConfig
from p2p.offence import Offence
from p2p.transport.memory import MemoryNetwork
from p2p.wire import pack
from roles.contract.core.file import (
    DOMAIN,
    FORMAT,
    MAX_COMPLAINT,
    MAX_RUN,
    _sorted,
    open_run,
    write_table,
)
from tests.counting import calls_at_most
from tests.support.nodes import CONFIG, Echo, member, wait_members
from tests.support.runs import OWNER, RUN, STRANGER, TERMS, TRAINER, VALIDATOR

MOST_CALLS = 100_000
"""To read a document of 256 KiB at most; the worst below makes 20,555."""

TABLE = write_table(TERMS)
NESTED: Any = b""
for _ in range(7):
    NESTED = [NESTED]
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1e308, 1e-320, math.inf,
    -math.inf, math.nan, "", "x" * 50_000, "\x1b[2J\r\n\0", "\u202eevil\u2066", "\U0010ffff",
    b"", b"\0" * 50_000, [], {}, [[]], [None] * 1_000, [0] * 1_000, ["1" * 128] * 900,
    ["z" * 128], [{}] * 1_000, {"": {}}, {"name": {"name": {}}}, NESTED,
    {str(number): number for number in range(1_000)},
    [{"name": "sort", "digest": b"0" * 32}] * 65, [str(OWNER.peer_id)] * 1_000,
)  # fmt: skip


def signed(body: bytes, key: KeyPair = OWNER) -> bytes:
    owner = key.peer_id.digest
    return pack([FORMAT, owner, body, key.sign(DOMAIN, pack([FORMAT, owner, body]))])


def places(table: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in the table."""
    yield path
    items = (
        table.items()
        if isinstance(table, dict)
        else enumerate(table)
        if isinstance(table, list)
        else ()
    )
    for key, value in items:
        yield from places(value, (*path, key))


PLACES = list(places(TABLE))


def changed(path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    table: Any = deepcopy(TABLE)
    place = table
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return table


def peculiar_bodies() -> Iterator[bytes]:
    """Tables that are wrong as bytes, or as a whole."""
    sound = pack(_sorted(TABLE))
    yield b""
    yield sound + b"\0"
    yield sound[:-1]
    yield pack(dict(reversed(_sorted(TABLE).items())))  # type: ignore[attr-defined]  # another order
    yield sound[:1] + pack("name") + pack("first") + sound[1:]
    yield bytes([sound[0] + 1]) + pack("name") + pack("twice") + sound[1:]  # a key twice
    yield pack({**TABLE, "epoch": 1.0})
    yield sound.replace(
        pack("epoch") + b"\x01", pack("epoch") + b"\xcd\0\x01"
    )  # an int longer than it must be
    # a timestamp
    yield sound.replace(pack("epoch") + b"\x01", pack("epoch") + b"\xd6\xff\0\0\0\x01")
    yield pack(_sorted({**TABLE, "surprise": 1}))
    yield pack(_sorted({**TABLE, "x" * 100_000: 1}))
    yield pack(_sorted({**TABLE, "\x1b[2J\u202e": 1}))
    yield pack({**TABLE, b"bytes": 1})
    yield b"\xde\xff\xff" + b"\xa0" * 1_000
    yield b"\x91" * 200_000
    yield b"\x81\xa0" * 100_000
    yield b"\xdd\xff\xff\xff\xff"
    yield pack(["x"] * 4_000)
    yield pack(_sorted({**TABLE, "trainers": ["1" * 250] * 1_000}))
    yield b"\xdb" + (MAX_RUN - 200).to_bytes(4, "big") + b"\xff" * (MAX_RUN - 200)


def hostile_bodies() -> Iterator[bytes]:
    yield from peculiar_bodies()
    for path in PLACES:
        for value in HOSTILE_VALUES:
            try:
                yield pack(_sorted(changed(path, value)))
            except ValueError:  # deeper than msgpack will pack
                continue


def mixed(rng: random.Random) -> bytes:
    """Several hostile values in one table."""
    table: Any = deepcopy(TABLE)
    for path in rng.sample(PLACES[1:], 6):
        place = table
        with suppress(LookupError, TypeError):  # what is there no more was replaced before
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = deepcopy(rng.choice(HOSTILE_VALUES))
    return pack(table)


class Reader:
    """The real reader; whatever it raises that is no `BadMessage` is kept."""

    def __init__(self) -> None:
        self.crashes: list[Exception] = []
        self.calls = 0

    def __call__(
        self, document: bytes, verify: Verify, pin: SignedRun | None = None, /
    ) -> SignedRun:
        self.calls += 1
        try:
            return open_run(document, verify, pin)
        except BadMessage:
            raise
        except Exception as error:
            self.crashes.append(error)
            raise


def check_complaint(error: BadMessage) -> None:
    assert str(error).isprintable()
    assert len(str(error)) <= MAX_COMPLAINT + 200


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "new"])
async def test_whatever_an_owner_signs_a_book_refuses_or_takes_it(
    tmp_path: Path, is_pinned: bool
) -> None:
    """Wrong types, sizes, keys and forms everywhere in the table, all well
    signed.
    """
    reader, rng, refused = Reader(), random.Random(1), 0
    # thousands: each book gets a part of them, all kinds in both
    single = list(hostile_bodies())
    bodies = [*peculiar_bodies(), *single[is_pinned::5], *(mixed(rng) for _ in range(150))]
    for number, body in enumerate(bodies):
        book = RunBook(RealWorld(KeyPair(b"k" * 32), tmp_path / str(number % 8)), reader)
        if is_pinned:
            book._run = book._pin = RUN
        try:
            with calls_at_most(MOST_CALLS):
                await book.offer(signed(body))
        except BadMessage as error:
            refused += 1
            check_complaint(error)
        assert book.run is not None or not is_pinned
    assert reader.crashes == []
    assert refused > len(bodies) * 0.8


async def test_another_owners_document_costs_no_signature_and_another_runs_one(
    tmp_path: Path,
) -> None:
    """The whole table was read before the run was compared."""
    judged: list[PeerId] = []

    def count(signer: PeerId, *rest: Any) -> bool:
        judged.append(signer)
        return verify(signer, *rest)

    world = RealWorld(KeyPair(b"k" * 32), tmp_path)
    world.verify = count
    book = RunBook(world, open_run)
    await book.offer(RUN.document)
    void = {**TABLE, "model": 0}
    for key, name, signatures in ((STRANGER, "x", 0), (OWNER, "other", 1)):
        judged.clear()
        document = signed(pack(_sorted({**void, "name": name})), key)
        with pytest.raises(OtherRun):
            await book.offer(document)
        assert len(judged) == signatures


@pytest.mark.parametrize(
    "crash", [ZeroDivisionError, KeyError, RecursionError, MemoryError, AssertionError, OSError]
)
async def test_a_reader_that_crashes_refuses(tmp_path: Path, crash: type[Exception]) -> None:
    """Readers are other packages', and what they raise ended the node."""

    def read(document: bytes, verify: Verify, pin: SignedRun | None = None, /) -> SignedRun:
        raise crash("a bug")

    book = RunBook(RealWorld(KeyPair(b"k" * 32), tmp_path), read)
    with pytest.raises(BadMessage, match="crashed"):
        await book.offer(RUN.document)
    with pytest.raises(BadMessage, match="crashed"):
        await book.offer(RUN.document)


class Fence:
    """A host's word about whom it penalised."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self.penalties: list[tuple[PeerId, float]] = []
        real = type(host).penalise

        def penalise(which: Any, peer: PeerId, points: float, reason: str) -> None:
            if which is host:
                self.penalties.append((peer, points))
            real(which, peer, points, reason)

        monkeypatch.setattr(type(host), "penalise", penalise)


def hand_out(
    host: Host, documents: list[bytes], takers: list[PeerId] | None = None
) -> trio.Event:
    """Answer whoever asks for the run with the next hostile document, and note who took it; set
    when all were handed out.
    """
    left, done = list(documents), trio.Event()

    async def answer(peer: PeerId, _: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        if not left:
            done.set()
            return b""
        if takers is not None:
            takers.append(peer)
        return left.pop(0)

    host.set_handler(PROTOCOL_ID, serve_requests(answer), replaces=True)
    return done


async def test_one_joining_peer_ends_no_relay_worker_or_validator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A self-signed run file with key_heads = 0 ended all three within 25 s."""
    shape = {**TABLE["model"]["shape"], "key_heads": 0}  # type: ignore[index]
    lethal = {**TABLE, "model": {**TABLE["model"], "shape": shape}}  # type: ignore[dict-item]
    bodies = [
        pack(_sorted(table))
        for table in (lethal, {**TABLE, "sampling": {"lag": -1}}, {**TABLE, "epoch": "2"})
    ]
    documents = [signed(body, key) for body in bodies for key in (STRANGER, OWNER)] * 3
    void = [b"garbage", signed(bodies[0])[:-1]]
    config = replace(CONFIG, run=RunConfig(refresh=0.02))
    network, joining = MemoryNetwork(), KeyPair(b"j" * 32)
    roles = [Echo(), Echo(), Echo()]
    with trio.fail_after(30):
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(
                member(network, tmp_path / "0", TRAINER, document=RUN.document, config=config)
            )
            nodes: list[Node] = [first]
            for number, key in enumerate((VALIDATOR, KeyPair(b"w" * 32)), 1):
                joined = member(
                    network,
                    tmp_path / str(number),
                    key,
                    bootstrap=first.host.addrs,
                    config=config,
                )
                nodes.append(await stack.enter_async_context(joined))
            hostile = await stack.enter_async_context(
                member(network, tmp_path / "h", joining, bootstrap=first.host.addrs)
            )
            nursery = await stack.enter_async_context(trio.open_nursery())
            for node, role in zip(nodes, roles, strict=True):
                nursery.start_soon(run_roles, node, [role])
            fence = Fence(first.host, monkeypatch)
            done = hand_out(hostile.host, documents)
            for node in nodes:
                await wait_members(node, 3)
            await done.wait()
            assert fence.penalties == []  # what it handed over was signed by others
            takers: list[PeerId] = []  # also in the rounds that each node makes by itself
            hand_out(hostile.host, void, takers)
            for document in void:
                hand_out(hostile.host, [document] * 3, takers)
                with pytest.raises((BadMessage, PeerUnreachable)):  # or refused by then
                    await first.book.ask(first.host, joining.peer_id)
            assert (joining.peer_id, Offence.VIOLATION.points) in fence.penalties
            assert len(fence.penalties) <= takers.count(first.host.peer_id)
            newcomer = member(
                network, tmp_path / "n", KeyPair(b"n" * 32), bootstrap=first.host.addrs
            )
            late = await stack.enter_async_context(newcomer)
            assert late.run == RUN
            assert all(node.run == RUN for node in nodes)
            nursery.cancel_scope.cancel()
