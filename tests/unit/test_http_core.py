"""The pure functions of the HTTP edge: laws by Hypothesis, foreign bytes by fuzzing."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.shardcast.http.core.answers import (
    MAX_LISTING,
    MAX_SHARDS,
    Body,
    Listed,
    Slice,
    decode_listing_untrusted,
    encode_listing,
    parse_range_untrusted,
    parse_shard_path_untrusted,
    shard_path,
    tar_of,
)
from p2p.shardcast.manifest import PolicyVersion

FILES = [b"weights" * 100, b"", bytes(range(256)) * 7]


def read(body: Body, start: int, end: int, most: int) -> bytes:
    parts = list(body.pieces(start, end, most))
    assert all(len(p) if isinstance(p, bytes) else p.length for p in parts)
    assert all((len(p) if isinstance(p, bytes) else p.length) <= most for p in parts)
    return b"".join(
        p if isinstance(p, bytes) else FILES[p.file][p.offset : p.offset + p.length]
        for p in parts
    )


@given(st.data(), st.integers(1, 700))
def test_any_part_of_a_body_is_that_part_of_the_whole(data: st.DataObject, most: int) -> None:
    pieces: list[Slice | bytes] = [
        b"head", Slice(0, 3, 600), b"", Slice(1, 0, 0), Slice(2, 5, 1500), b"tail",
    ]  # fmt: skip
    body = Body(pieces)
    whole = read(body, 0, body.size, 10**6)
    assert len(whole) == body.size == 4 + 600 + 1500 + 4
    start = data.draw(st.integers(0, body.size))
    end = data.draw(st.integers(start, body.size))
    assert read(body, start, end, most) == whole[start:end]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=5-", (5, 100)),
        ("bytes=5-1000", (5, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-1000", (0, 100)),
        ("bytes= 1-2", (1, 3)),
        # what is answered with the whole body
        ("bytes=2-1", None),
        ("bytes=0-1,5-6", None),
        ("lines=0-1", None),
        ("bytes=-", None),
        ("bytes=١-٢", None),
        ("bytes=" + "1" * 19 + "-", None),
        ("bytes=0-1" + " " * 2000, None),
    ],
)
def test_a_range_is_read_as_the_rfc_says(header: str, expected: tuple[int, int] | None) -> None:
    part = parse_range_untrusted(header, 100)
    assert part == (None if expected is None else range(*expected))


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_a_range_behind_the_end_cannot_be_satisfied(header: str) -> None:
    assert not len(parse_range_untrusted(header, 100))
    assert not len(parse_range_untrusted("bytes=0-", 0))


@given(st.text(max_size=60), st.integers(0, 10**6))
def test_whatever_a_header_says_the_range_lies_in_the_body(header: str, size: int) -> None:
    for text in (header, f"bytes={header}"):
        part = parse_range_untrusted(text, size)
        assert not part or 0 <= part.start < part.stop <= size


def test_python_unpacks_the_archive_and_it_is_the_same_everywhere() -> None:
    names = ["model/a.safetensors", "empty", "deep/" * 30 + "ünïcode.json"]
    archive = tar_of([(name, len(data)) for name, data in zip(names, FILES, strict=True)])
    data = read(archive, 0, archive.size, 100)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = tar.getmembers()
        assert [m.name for m in members] == names
        assert all(m.mtime == m.uid == m.gid == 0 and m.mode == 0o644 for m in members)
        for member, content in zip(members, FILES, strict=True):
            file = tar.extractfile(member)
            assert file is not None
            assert file.read() == content


def test_an_archive_may_hold_more_than_eight_gigabytes() -> None:
    size = 10 * 1024**3
    archive = tar_of([("big", size), ("small", 3)])
    assert archive.size > size
    [small] = [
        p for p in archive.pieces(size, archive.size, 10**6) if isinstance(p, Slice) and p.file
    ]
    assert small == Slice(1, 0, 3)


LISTINGS = st.lists(
    st.builds(
        Listed,
        st.integers(0, 10**9 - 1).map(PolicyVersion),
        st.binary(min_size=32, max_size=32),
        st.integers(1, MAX_SHARDS),
    ),
    unique_by=lambda entry: entry.version,
    max_size=20,
)


@given(LISTINGS)
def test_a_listing_is_read_back_newest_first(entries: list[Listed]) -> None:
    found = decode_listing_untrusted(encode_listing(entries))
    assert found == sorted(entries, key=lambda entry: -entry.version)


def test_the_listing_is_the_one_that_shardcast_writes() -> None:
    digest = bytes(range(32))
    written = f"v1: {digest.hex()}|3\nv12: {digest.hex()}|1\n".encode()
    assert (
        encode_listing(
            [Listed(PolicyVersion(12), digest, 1), Listed(PolicyVersion(1), digest, 3)]
        )
        == written
    )


@pytest.mark.parametrize(
    "text",
    [
        f"v1: {'0' * 64}|0",
        f"v1: {'0' * 64}|{MAX_SHARDS + 1}",
        f"v1: {'0' * 64}|999999999999",
        f"v1: {'0' * 63}|1",
        f"v1: {'0' * 64}",
        f"v1: {'0' * 64}|1\nv1: {'1' * 64}|1",
        f"v99999999999: {'0' * 64}|1",
        "v1",
        "v" * (MAX_LISTING + 1),
    ],
)
def test_a_listing_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(BadMessage):
        decode_listing_untrusted(text.encode())


@given(
    st.binary(max_size=300)
    | st.text(alphabet="v0123456789abcdef:| \n", max_size=300).map(str.encode)
)
def test_a_listing_raises_nothing_else(data: bytes) -> None:
    try:
        entries = decode_listing_untrusted(data)
    except BadMessage:
        return
    assert all(0 < entry.shards <= MAX_SHARDS for entry in entries)


@given(st.integers(0, 10**9 - 1), st.integers(0, MAX_SHARDS - 1))
def test_a_shard_has_one_path(version: int, shard: int) -> None:
    assert parse_shard_path_untrusted(shard_path(version, shard)) == (version, shard)


@pytest.mark.parametrize(
    "path", ["v1/shard_00000.bin", "v1/shard_1.bin", "v/shard_00001.bin", "v1/shard_00001.bin/"]
)
def test_other_paths_are_no_shards(path: str) -> None:
    assert parse_shard_path_untrusted(path) is None
