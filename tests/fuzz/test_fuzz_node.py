"""Run files, run requests, run records, ledger entries: whatever the bytes, `BadMessage` and
nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from p2p.dht import Record
from p2p.equivocation import Equivocation
from p2p.errors import BadMessage
from p2p.identity import KeyPair, verify
from p2p.ledger.core.chain import (
    EMPTY,
    decode_entry_untrusted,
    decode_fork_untrusted,
    make_entry,
    read_segment,
)
from p2p.machine import RealWorld
from p2p.node.admission import (
    Credential,
    decode_credential_untrusted,
    decode_invite_untrusted,
    decode_pass_untrusted,
    sign_invite,
)
from p2p.node.clock import decode_clock_untrusted
from p2p.node.plugins import open_run_untrusted
from p2p.node.rundoc import RunBook
from p2p.node.wiring import places_untrusted
from p2p.wire import pack
from roles.contract.core.file import decode_run_untrusted, open_run
from tests.support.runs import RUN

AUTHOR = KeyPair(b"a" * 32)
ENTRIES = [make_entry(EMPTY, AUTHOR, "verdict", body, 0) for body in (b"yes", b"no")]


INVITE = sign_invite(RUN.id, "inference", 3, 2_000_000_000, b"s" * 32, AUTHOR)
PASS = INVITE.pass_for(AUTHOR.peer_id).to_bytes()


def as_invite(data: bytes) -> object:
    return decode_invite_untrusted(data.decode("latin-1"))


def record(value: bytes) -> Record:
    return Record("run", RUN.id, AUTHOR.peer_id, b"", 1, 1, value, b"")


def as_places(data: bytes) -> object:
    return places_untrusted(record(data))


DECODERS: list[tuple[Callable[[bytes], object], bytes]] = [
    (decode_run_untrusted, RUN.document),
    (lambda data: open_run_untrusted(data, verify), RUN.document),
    (decode_entry_untrusted, ENTRIES[0].encode()),
    (decode_fork_untrusted, Equivocation(*ENTRIES).encode()),
    (decode_clock_untrusted, pack([1.8e9])),
    (as_invite, INVITE.to_text().encode()),
    (decode_pass_untrusted, PASS),
    (decode_credential_untrusted, Credential(b"n" * 8, PASS, b"w" * 8).to_bytes()),
    (as_places, pack([b"\x04\x7f\x00\x00\x01\x06\x10\x00"])),
]
NAMES = ["run file", "run file by plug-in", "entry", "ledger fork", "clock", "invite", "pass"]
NAMES += ["credential", "run record"]


def survives(decode: Callable[[bytes], object], data: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode(data)


@pytest.mark.parametrize(("decode", "valid"), DECODERS, ids=NAMES)
def test_the_valid_example_is_valid(decode: Callable[[bytes], object], valid: bytes) -> None:
    decode(valid)


@pytest.mark.parametrize(("decode", "valid"), DECODERS, ids=NAMES)
@given(data=st.data())
def test_damaged_bytes(
    decode: Callable[[bytes], object], valid: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    survives(decode, bytes(damaged))
    survives(decode, bytes(damaged[:cut]))
    survives(decode, data.draw(st.binary(max_size=64)))


plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4)
nested = st.recursive(
    plain | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(("decode", "valid"), DECODERS, ids=NAMES)
@given(value=nested)
def test_well_formed_nonsense(
    decode: Callable[[bytes], object], valid: bytes, value: object
) -> None:
    survives(decode, pack(value))


@given(st.binary(max_size=400))
def test_a_segment_never_raises(data: bytes) -> None:
    segment = read_segment(data, EMPTY, AUTHOR.peer_id)
    assert segment.whole <= len(data)


@given(st.binary(max_size=64) | nested.map(pack))
def test_run_requests(question: bytes) -> None:
    book = RunBook(RealWorld(AUTHOR, Path("/nowhere")), open_run)
    for answer in (book._answer, book._answer_rival):
        steps = answer(AUTHOR.peer_id, question)
        # it never waits: it has answered, or refused
        with pytest.raises((BadMessage, StopIteration)):
            steps.send(None)
