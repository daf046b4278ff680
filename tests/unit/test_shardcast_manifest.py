"""Manifests, indexes and the codec."""

from __future__ import annotations

import itertools
import json
import struct
from dataclasses import replace
from random import Random

import pytest
import zstandard
from hypothesis import given, strategies as st

from p2p.equivocation import Equivocation
from p2p.errors import BadMessage
from p2p.identity import KeyPair, verify
from p2p.shardcast.chunkset import ChunkSet
from p2p.shardcast.codec import ANCHOR, decode_chunk_untrusted, encode_chunk, wire_limit
from p2p.shardcast.core.handout import HandOut
from p2p.shardcast.core.queue import CREDIT, Lines
from p2p.shardcast.forest import Roster, RosterEntry, build_forest
from p2p.shardcast.index import (
    MAX_CHUNKS,
    MAX_SIZE,
    MAX_SPAN,
    Index,
    PolicyFile,
    Span,
    decode_index_untrusted,
    digest_of,
    is_path,
    right_mask,
)
from p2p.shardcast.layout import (
    cut_file,
    cut_files,
    header_bytes,
    tensors_untrusted,
)
from p2p.shardcast.manifest import (
    MAX_MANIFEST,
    NO_POLICY,
    Encoding,
    Manifest,
    PolicyVersion,
    decode_manifest_untrusted,
)
from p2p.wire import KI
from tests.shardcast_policies import index_of

TRAINER = KeyPair(digest_of(b"trainer"))
INDEX = index_of([b"a" * 20, b"b" * 40])
ANCHORED = Encoding.anchor(INDEX, 50)


def manifest(version: int = 7, *, signer: KeyPair = TRAINER, **changes: object) -> Manifest:
    fields: dict[str, object] = {
        "run": b"run",
        "version": PolicyVersion(version),
        "previous_version": NO_POLICY,
        "previous": b"",
        "weights_digest": INDEX.digest,
        "size": 60,
        "encodings": (ANCHORED,),
    }
    return Manifest(signer.peer_id, **(fields | changes)).sign(signer)  # type: ignore[arg-type]


def test_a_manifest_survives_the_wire_and_is_the_same_each_time() -> None:
    made = manifest()
    assert manifest().encode() == made.encode()
    decoded = decode_manifest_untrusted(made.encode(), b"run", verify)
    assert decoded == made
    assert (decoded.version, decoded.size, decoded.anchor.chunks) == (7, 60, 2)
    assert len(made.encode()) < 400
    assert repr(made).startswith(f"Manifest(v7, {made.digest.hex()[:8]}, by PeerId(")


@pytest.mark.parametrize(
    "changes",
    [
        {"version": PolicyVersion(-1)},
        {"previous_version": PolicyVersion(7), "previous": bytes(32)},
        {"previous_version": PolicyVersion(6)},
        {"size": 0},
        {"size": MAX_SIZE + 1},
        {"encodings": ()},
        {"encodings": (ANCHORED, ANCHORED)},
        {"encodings": (Encoding(ANCHOR, NO_POLICY, MAX_CHUNKS + 1, 10),)},
        {"encodings": (Encoding(ANCHOR, NO_POLICY, 2, 10, bytes(32)),)},
        {"encodings": (ANCHORED, Encoding("delta", PolicyVersion(6), 1, 10))},
        {"weights_digest": b"short"},
        {"run": b"other"},
        {"note": b"short"},
    ],
)
def test_manifests_out_of_bounds_are_refused_even_if_signed(changes: dict[str, object]) -> None:
    with pytest.raises(BadMessage):
        decode_manifest_untrusted(manifest(**changes).encode(), b"run", verify)


def test_a_manifest_of_somebody_else_is_refused() -> None:
    made = manifest()
    forged = replace(made, publisher=KeyPair(bytes(32)).peer_id, signature=bytes(64))
    with pytest.raises(BadMessage, match="signature"):
        decode_manifest_untrusted(forged.encode(), b"run", verify)
    with pytest.raises(BadMessage, match="limit"):
        decode_manifest_untrusted(bytes(MAX_MANIFEST + 1), b"run", verify)


def test_what_proves_equivocation() -> None:
    one, other = manifest(), manifest(size=61)
    child = manifest(8, previous_version=PolicyVersion(7), previous=one.digest)
    assert Equivocation(one, other).number == Equivocation(other, child).number == 7
    for agrees in (one, manifest(signer=KeyPair(bytes(32))), child):
        with pytest.raises(BadMessage, match="prove no equivocation"):
            Equivocation(one, agrees)


def test_predecessors_by_other_publishers_prove_nothing() -> None:
    """A publisher that takes over names what it has heard of, which another signed."""
    one, other = (
        manifest(version, previous_version=PolicyVersion(4), previous=bytes([version]) * 32)
        for version in (5, 6)
    )
    with pytest.raises(BadMessage, match="prove no equivocation"):
        Equivocation(one, other)


def test_indexes_must_be_what_was_named_and_add_up() -> None:
    made = manifest()
    assert made.index_untrusted(INDEX.data) == INDEX
    assert (INDEX.size, INDEX.offsets, INDEX.starts) == (60, (0, 20, 60), (0,))
    with pytest.raises(BadMessage, match="names"):
        made.index_untrusted(INDEX.data[:-1] + b"\1")
    with pytest.raises(BadMessage, match="add up"):
        manifest(size=61).index_untrusted(INDEX.data)
    with pytest.raises(BadMessage, match="as many spans"):
        manifest(encodings=(Encoding(ANCHOR, NO_POLICY, 3, 50),)).index_untrusted(INDEX.data)


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([Span(bytes(32), 0), Span(bytes(32), 60)], "out of bounds"),
        ([Span(bytes(32), 60, 3)], "out of bounds"),
        ([Span(bytes(32), 30, 4), Span(bytes(32), 30)], "out of bounds"),
        ([Span(bytes(32), MAX_SPAN + 1)], "out of bounds"),
    ],
)
def test_spans_out_of_bounds_are_refused(spans: list[Span], reason: str) -> None:
    data = Index.of([PolicyFile("", 60)], spans).data
    with pytest.raises(BadMessage, match=reason):
        decode_index_untrusted(data, digest_of(data), len(spans), 60)


@pytest.mark.parametrize(
    "path",
    [
        "", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "a/", "/", "./a", ".ssh/keys",
        "a/.b", "a\0b", "a\nb", "a\\b", "C:x", "a ", "a.", "x" * 256,
        "x/" * 300 + "x", "\ud800",
    ],
)  # fmt: skip
def test_paths_that_lead_elsewhere_are_refused(path: str) -> None:
    assert not is_path(path)


@pytest.mark.parametrize(
    "paths",
    [
        ["a", "a"],
        ["a", "A"],
        ["a", "a/b"],
        ["model/x/y", "model/x"],
        ["b", "a"],
        ["", "a"],
        ["a", "../b"],
    ],
)
def test_files_that_cannot_exist_together_are_refused(paths: list[str]) -> None:
    data = _index_of_paths(paths)
    with pytest.raises(BadMessage):
        decode_index_untrusted(data, digest_of(data), 1, 60)


def test_a_million_files_are_refused_at_once() -> None:
    data = (10**6).to_bytes(4, "big") + b"\0\1" * 100_000
    with pytest.raises(BadMessage, match="1000000 files"):
        decode_index_untrusted(data, digest_of(data), 1, 60)
    paths = [f"{number:0500d}" for number in range(1000)]
    data = _index_of_paths(paths)
    with pytest.raises(BadMessage, match="out of bounds"):
        decode_index_untrusted(data, digest_of(data), 1, 60)


def _index_of_paths(paths: list[str]) -> bytes:
    sizes = [60] + [0] * (len(paths) - 1)
    files = [PolicyFile(path, size) for path, size in zip(paths, sizes, strict=True)]
    return Index.of(files, [Span(bytes(32), 60)]).data


def test_spans_do_not_cross_files() -> None:
    files = [PolicyFile("a", 30), PolicyFile("b", 30)]
    data = Index.of(files, [Span(bytes(32), 20), Span(bytes(32), 40)]).data
    with pytest.raises(BadMessage, match="add up"):
        decode_index_untrusted(data, digest_of(data), 2, 60)


def test_where_spans_lie_among_files_some_of_which_are_empty() -> None:
    sizes = [0, 30, 0, 0, 25, 0]
    files = [PolicyFile(f"f{number}", size) for number, size in enumerate(sizes)]
    index = Index.of(files, [Span(bytes(32), size) for size in (10, 20, 25)])
    assert decode_index_untrusted(index.data, index.digest, 3, 55) == index
    places = [index.place(span) for span in range(3)]
    assert [(files[p.file].path, p.offset) for p in places] == [
        ("f1", 0), ("f1", 10), ("f4", 0),
    ]  # fmt: skip


@given(st.binary(min_size=1, max_size=5000), st.sampled_from([0, 2, 4]))
def test_pack_and_unpack(raw: bytes, kind: int) -> None:
    raw = raw * max(1, kind)
    span = Span(digest_of(raw), len(raw), kind)
    wire = encode_chunk(span, raw)
    assert len(wire) <= wire_limit(span)
    assert bytes(decode_chunk_untrusted(span, wire)) == raw


def test_numbers_pack_as_well_as_they_can() -> None:
    rng = Random(1)
    weights = [struct.pack("<f", rng.gauss(0, 0.02))[2:] for _ in range(64 * KI)]
    raw = b"".join(weights)
    sizes = {kind: len(encode_chunk(Span(b"", len(raw), kind), raw)) for kind in (0, 2)}
    assert len(raw) / sizes[2] >= 1.46
    assert len(raw) / sizes[0] < 1.35


def test_a_bomb_is_refused_by_its_header() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    with pytest.raises(BadMessage, match="decompresses to 100000000"):
        decode_chunk_untrusted(Span(bytes(32), 1000), _length(bomb) + bomb)
    raw = b"weights" * 100
    span = Span(digest_of(raw), len(raw))
    wire = encode_chunk(span, raw)
    frame = wire[4:]
    others = (b"%07d" % number * 100 for number in itertools.count())
    alike = next(other for other in others if digest_of(other)[:1] == span.digest[:1])
    assert right_mask([span], alike) == 0
    for wrong in (
        _length(alike, stored=True) + alike,
        wire[:-1] + b"\0",
        wire[:-1],
        wire + b"\0",
        wire[:3],
        b"",
        _length(frame * 2) + frame * 2,
        _length(raw, stored=True) + raw[:-1] + b"!",
        _length(raw) + raw,
        b"\xff" * 700,
    ):
        with pytest.raises(BadMessage):
            decode_chunk_untrusted(span, wrong)


def _length(plane: bytes, *, stored: bool = False) -> bytes:
    return (len(plane) | stored << 31).to_bytes(4, "big")


def safetensors(*tensors: tuple[str, int], end: int | None = None) -> tuple[bytes, int]:
    """The header of a file with tensors of these types and bytes, and the file's size."""
    described, at = {}, 0
    for number, (dtype, size) in enumerate(tensors):
        described[f"t{number}"] = {"dtype": dtype, "shape": [], "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(described).encode()
    return header, 8 + len(header) + (at if end is None else end)


def test_files_are_cut_at_tensors() -> None:
    header, size = safetensors(("BF16", 100), ("BF16", 60), ("F32", 400), ("F8_E4M3", 7))
    tensors = tensors_untrusted(header, size)
    cuts = cut_file(size, tensors, 256)
    front = 8 + len(header)
    assert cuts == [
        Span(b"", 256), Span(b"", front - 256), Span(b"", 160, 2), Span(b"", 256, 4),
        Span(b"", 144, 4), Span(b"", 7),
    ]  # fmt: skip
    assert sum(cut.size for cut in cuts) == size
    odd, size = safetensors(("BF16", 101))
    assert cut_file(size, tensors_untrusted(odd, size), 4096)[-1] == Span(b"", 101)


@given(
    st.lists(
        st.tuples(st.sampled_from(["BF16", "F32", "F16", "I64", "U8"]), st.integers(0, 3000)),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([64, 256, 1024]),
    st.integers(0, 300),
)
def test_no_span_holds_two_types(tensors: list[tuple[str, int]], span: int, rest: int) -> None:
    header, size = safetensors(*tensors)
    size += rest
    found = tensors_untrusted(header, size)
    cuts = cut_file(size, found, span)
    assert sum(cut.size for cut in cuts) == size
    at = 0
    for cut in cuts:
        assert 0 < cut.size <= span
        assert not cut.kind or cut.size % cut.kind == 0
        kinds = {t.kind for t in found if t.start < at + cut.size and t.end > at}
        assert kinds <= {cut.kind}
        at += cut.size


def test_a_cut_off_safetensors_file_is_told_from_other_files() -> None:
    header, size = safetensors(("BF16", 100))
    front = len(header).to_bytes(8, "little") + header
    assert header_bytes(front[:9], size) == len(header)
    with pytest.raises(BadMessage, match="cut off"):
        header_bytes(front[:9], 20)
    with pytest.raises(BadMessage, match="cut off"):
        tensors_untrusted(header, size - 1)
    assert header_bytes(b"\xff" * 9, 1000) == 0
    assert header_bytes(b"", 0) == 0
    for other in (b"{", b"[]", b"{}", b'{"a": 1}', b'{"a": {"dtype": "BF16"}}', b"[" * 9999):
        assert tensors_untrusted(other, 10_000) == []
    overlapping, size = safetensors(("BF16", 100), ("BF16", 100))
    overlapping = overlapping.replace(b"[100, 200]", b"[ 60, 160]")
    assert tensors_untrusted(overlapping, size) == []


def test_a_policy_with_too_many_spans_gets_larger_ones_or_none() -> None:
    many = [(MAX_SIZE // 4, ())] * 4
    assert cut_files(many, MAX_SPAN // 2) == cut_files(many, MAX_SPAN)
    assert cut_files([*many, (1, ())], MAX_SPAN) is None


@given(st.integers(0, 2**200))
def test_masks_and_ranges(mask: int) -> None:
    parts = [ChunkSet.of_ranges(part) for part in ChunkSet(mask).ranges()]
    assert sum(part.mask for part in parts) == mask
    assert ChunkSet.of(ChunkSet(mask)) == ChunkSet(mask)
    assert list(ChunkSet(mask).from_place(0)) == list(ChunkSet(mask))


def test_a_hand_out_gives_every_chunk_once_to_those_with_credit() -> None:
    peers = [KeyPair(digest_of(bytes([number]))).peer_id for number in range(4)]
    roster = Roster.sign(TRAINER, b"run", 1, [RosterEntry(peer) for peer in peers])
    index = index_of([bytes((n,)) * 20 for n in range(20)])
    anchored = Encoding.anchor(index, 200)
    forest = build_forest(roster, PolicyVersion(1))
    handout = HandOut(PolicyVersion(1), anchored, forest, 0.0, 0.5, lines=Lines())
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
