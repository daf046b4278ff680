"""Manifests, indexes and the codec."""

from __future__ import annotations

import pytest
import zstandard
from hypothesis import given, settings, strategies as st

from p2p.errors import BadMessage, LocalProtocolError
from p2p.identity import KeyPair, verify
from p2p.shardcast.chunkset import EMPTY, ChunkSet
from p2p.shardcast.codec import (
    decode_chunk_untrusted,
    decode_chunks_untrusted,
    encode_span,
    encode_spans,
    header_span,
    span_for,
)
from p2p.shardcast.core.chunks import TRANSITIONS, ChunkEvent, ChunkState, ChunkStates
from p2p.shardcast.core.handout import HandOut
from p2p.shardcast.core.line import CREDIT, Lines
from p2p.shardcast.forest import Roster, RosterEntry, build_forest
from p2p.shardcast.manifest import (
    MAX_CHUNKS,
    MAX_MANIFEST,
    NO_POLICY,
    Chunk,
    Encoding,
    Equivocation,
    Index,
    Manifest,
    ManifestBody,
    PolicyVersion,
    decode_index_untrusted,
    decode_manifest_untrusted,
    digest_of,
)
from p2p.wire import KI

TRAINER = KeyPair(digest_of(b"trainer"))
INDEX = Index.of([Chunk(digest_of(b"a"), 10, 20), Chunk(digest_of(b"b"), 30, 40)])


def manifest(version: int = 7, *, signer: KeyPair = TRAINER, **changes: object) -> Manifest:
    fields: dict[str, object] = {
        "run": b"run",
        "version": PolicyVersion(version),
        "previous_version": NO_POLICY,
        "previous": b"",
        "weights_digest": digest_of(b"weights"),
        "size": 60,
        "header": 8,
        "encodings": (Encoding.of(INDEX),),
    }
    return ManifestBody(**(fields | changes)).sign(signer)  # type: ignore[arg-type]


def test_a_manifest_survives_the_wire_and_is_the_same_each_time() -> None:
    made = manifest()
    assert manifest().encode() == made.encode()
    decoded = decode_manifest_untrusted(made.encode(), b"run", verify)
    assert decoded == made
    assert (decoded.version, decoded.size, decoded.anchor.chunks) == (7, 60, 2)
    assert len(made.encode()) < 400
    assert repr(made).startswith(f"Manifest(v7, {made.digest.hex()[:8]}, by PeerId(")


def test_deltas_fit_into_the_format() -> None:
    delta = Encoding.of(INDEX, "gap-ulp-zstd1", PolicyVersion(6))
    made = manifest(encodings=(Encoding.of(INDEX), delta))
    assert decode_manifest_untrusted(made.encode(), b"run", verify).body.encodings[1] == delta


@pytest.mark.parametrize(
    "changes",
    [
        {"version": PolicyVersion(-1)},
        {"previous_version": PolicyVersion(7), "previous": bytes(32)},
        {"previous_version": PolicyVersion(6)},
        {"size": 0},
        {"header": 61},
        {"encodings": ()},
        {"encodings": (Encoding.of(INDEX), Encoding.of(INDEX))},
        {"encodings": (Encoding("raw-zstd1", NO_POLICY, MAX_CHUNKS + 1, 10, bytes(32)),)},
        {"weights_digest": b"short"},
        {"run": b"other"},
    ],
)
def test_manifests_out_of_bounds_are_refused_even_if_signed(changes: dict[str, object]) -> None:
    with pytest.raises(BadMessage):
        decode_manifest_untrusted(manifest(**changes).encode(), b"run", verify)


def test_a_manifest_of_somebody_else_is_refused() -> None:
    made = manifest()
    forged = Manifest(KeyPair(bytes(32)).peer_id, made.body, made.content, bytes(64))
    with pytest.raises(BadMessage, match="signature"):
        decode_manifest_untrusted(forged.encode(), b"run", verify)
    with pytest.raises(BadMessage, match="limit"):
        decode_manifest_untrusted(bytes(MAX_MANIFEST + 1), b"run", verify)


def test_what_proves_equivocation() -> None:
    one, other = manifest(), manifest(size=61)
    assert Equivocation(one, other).is_proof
    assert not Equivocation(one, one).is_proof
    assert not Equivocation(one, manifest(signer=KeyPair(bytes(32)))).is_proof
    child = manifest(8, previous_version=PolicyVersion(7), previous=one.digest)
    assert not Equivocation(one, child).is_proof
    assert Equivocation(other, child).is_proof


def test_indexes_must_be_what_was_named_and_add_up() -> None:
    named = Encoding.of(INDEX)
    assert decode_index_untrusted(INDEX.data, named, 60) == INDEX
    assert (INDEX.wire, INDEX.size, INDEX.offsets) == (40, 60, (0, 10, 40))
    with pytest.raises(BadMessage, match="add up"):
        decode_index_untrusted(INDEX.data, named, 61)
    with pytest.raises(BadMessage, match="names"):
        decode_index_untrusted(INDEX.data[:-1] + b"\0", named, 60)
    empty = Index.of([Chunk(bytes(32), 0, 60)])
    with pytest.raises(BadMessage, match="out of bounds"):
        decode_index_untrusted(empty.data, Encoding.of(empty), 60)


@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=1, max_size=5000), st.integers(1, 2000))
def test_cut_compress_and_back(raw: bytes, span: int) -> None:
    encoded = encode_spans(raw, span)
    chunks = [chunk for chunk, _ in encoded]
    assert sum(chunk.span for chunk in chunks) == len(raw)
    assert decode_chunks_untrusted(chunks, b"".join(wire for _, wire in encoded)) == raw


def test_a_bomb_is_refused_by_its_header() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    with pytest.raises(BadMessage, match="decompresses to 100000000"):
        decode_chunk_untrusted(Chunk(digest_of(bomb), len(bomb), 1000), bomb)
    chunk, wire = encode_span(b"weights")
    with pytest.raises(BadMessage, match="digest"):
        decode_chunk_untrusted(chunk, wire[:-1] + b"\0")
    twice = wire + wire
    with pytest.raises(BadMessage):
        decode_chunk_untrusted(Chunk(digest_of(twice), len(twice), 7), twice)


def test_spans_aim_at_a_quarter_thousand_chunks() -> None:
    assert span_for(420_000) == 32 * KI
    assert span_for(32 * 1024 * KI) == 128 * KI
    assert span_for(10**12) == 4096 * KI
    assert header_span((100).to_bytes(8, "little"), 1000) == 108
    assert header_span(b"\xff" * 8, 1000) == 0


@settings(max_examples=100)
@given(st.integers(0, 2**200))
def test_masks_and_ranges(mask: int) -> None:
    parts = [ChunkSet.of_ranges(part) for part in ChunkSet(mask).ranges()]
    assert sum(part.mask for part in parts) == mask
    assert ChunkSet.of(ChunkSet(mask)) == ChunkSet(mask)
    assert list(ChunkSet(mask).from_place(0)) == list(ChunkSet(mask))


def test_the_life_of_a_chunk_is_the_table() -> None:
    for state in ChunkState:
        for event in ChunkEvent:
            first = ChunkSet.of([0])
            states = ChunkStates(
                3,
                first if state is ChunkState.VERIFIED else EMPTY,
                first if state is ChunkState.REQUESTED else EMPTY,
            )
            after = TRANSITIONS.get((state, event))
            if after is None:
                with pytest.raises(LocalProtocolError):
                    states.advance(0, event)
            else:
                assert states.advance(0, event) is after
                assert states.of(0) is after


def test_a_hand_out_gives_every_chunk_once_to_those_with_credit() -> None:
    peers = [KeyPair(digest_of(bytes([number]))).peer_id for number in range(4)]
    roster = Roster.sign(TRAINER, b"run", 1, [RosterEntry(peer) for peer in peers])
    index = Index.of([Chunk(digest_of(bytes((n,))), 10, 20) for n in range(20)])
    policy = manifest(1, size=400, encodings=(Encoding.of(index),))
    forest = build_forest(roster, PolicyVersion(1))
    handout = HandOut(policy, forest, 0.0, 0.5, lines=Lines(), shortest=0.5)
    given = []
    while (gift := handout.give(lambda _: True, 0.0)) is not None:
        given.append(gift)
    assert len(given) == 4 * CREDIT
    assert [chunk for *_, chunk in given] == list(range(8))
    fast, slow = given[0][0], given[1][0]
    assert not handout.confirm(fast, 3, 5, 0.1)  # it was given two
    assert handout.confirm(fast, 2, 100, 0.1)
    more = [handout.give(lambda _: True, 0.1) for _ in range(3)]
    assert [gift and gift[0] for gift in more] == [fast, fast, None]
    handout.lose(slow)
    handout.confirm(fast, 4, 6, 0.2)
    lost = [chunk for peer, _, chunk in given if peer == slow]
    assert [
        gift and gift[2] for gift in (handout.give(lambda _: True, 0.2) for _ in range(2))
    ] == lost
