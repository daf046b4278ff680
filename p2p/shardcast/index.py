"""Index of a policy: files, laid end to end, and the spans in which they are checked.

The files of a policy are one stream of raw bytes, cut in *spans* at the borders of files and of
tensors (`layout`). The index lists the files and, per span, its BLAKE3, its bytes and its kind.
It is named by its own digest, which a manifest signs: so a signature of 64 bytes stands for
every byte of every file, whatever its way here was.

Nothing here speaks of bytes on the wire. How a span is packed for its way is its *encoding*
(`codec`), and a chunk is believed when it unpacks to a span with the right digest: two nodes
whose compressors differ serve each other, and an origin signs before it has compressed.
"""

from __future__ import annotations

import re
import struct
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from blake3 import blake3

from p2p.errors import BadMessage
from p2p.naming import MAX_NAME
from p2p.wire import KI, MIB

DIGEST_BYTES: Final = 32
"""Bytes of a BLAKE3 digest."""
MAX_SPAN: Final = 4 * MIB
"""Raw bytes of one span: the largest unit that is checked, lost or sent again as a whole."""
MAX_CHUNKS: Final = 64 * KI
"""Most spans of one policy, and so chunks of one encoding. With `MAX_SPAN` this bounds a policy
at 256 GiB and its span table at 2.4 MiB."""
MAX_FILES: Final = 4 * KI
"""Files of one policy: the largest sharded models have some 200, and every file costs a
descriptor, an fsync and a place in the span table."""
MAX_FILE_TABLE: Final = 256 * KI
"""Most bytes of a file table: 4,096 paths of 54 bytes. 512 bytes for each would be 2 MiB."""
MAX_SIZE: Final = MAX_CHUNKS * MAX_SPAN
_COUNT: Final = struct.Struct(">I")
_FILE: Final = struct.Struct(">HQ")
_SPAN: Final = struct.Struct(f">{DIGEST_BYTES}sIB")
MAX_INDEX: Final = _COUNT.size + MAX_FILE_TABLE + MAX_CHUNKS * _SPAN.size
"""Characters that no path may contain: control characters, and those that are special on
Windows."""


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """Return the BLAKE3 digest (32 bytes) by which content is named in SHARDCAST."""
    return blake3(data).digest()


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """A file of a policy: its path within it, and its bytes.

    The path of a policy that is one file is empty: the same weights are the same policy
    whatever their file is called at the publisher's.
    """

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive bytes of one file, described by their digest, size and kind."""

    digest: bytes
    size: int
    kind: int = 0
    """Bytes per value: 2 for bf16 and f16, 4 for f32, 0 for what is not known to be numbers.
    Encodings use it; a wrong one only packs worse."""


@dataclass(frozen=True, slots=True)
class SpanPlace:
    """The position of a span: the number of its file, and its first byte in the file."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class Index:
    """The files and spans of one policy, in order; named by the digest of its bytes."""

    files: tuple[PolicyFile, ...]
    spans: tuple[Span, ...]
    data: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    offsets: tuple[int, ...] = field(repr=False)
    """Start of each span in the concatenation of all files, followed by the total size."""
    starts: tuple[int, ...] = field(repr=False)
    """Start of each file in that concatenation."""

    @classmethod
    def of(cls, files: Sequence[PolicyFile], spans: Sequence[Span]) -> Index:
        """Return the index that lists ``files`` and ``spans``."""
        rows = [_COUNT.pack(len(files))]
        for file in files:
            path = file.path.encode()
            rows += [_FILE.pack(len(path), file.size), path]
        rows += [_SPAN.pack(span.digest, span.size, span.kind) for span in spans]
        data = b"".join(rows)
        return cls._made(tuple(files), tuple(spans), data, digest_of(data))

    @classmethod
    def _made(
        cls, files: tuple[PolicyFile, ...], spans: tuple[Span, ...], data: bytes, digest: bytes
    ) -> Index:
        offsets = tuple(accumulate((span.size for span in spans), initial=0))
        starts = tuple(accumulate((file.size for file in files[:-1]), initial=0))
        return cls(files, spans, data, digest, offsets, starts)

    @property
    def size(self) -> int:
        """Raw bytes of all files together."""
        return self.offsets[-1]

    @property
    def is_folder(self) -> bool:
        """True if the policy is a folder of files, False if it is a single file."""
        return self.files[0].path != ""

    def place(self, span: int) -> SpanPlace:
        """Return the position of a span."""
        offset = self.offsets[span]
        # Of files that start at one place all but the last are empty: it is the one.
        file = bisect_right(self.starts, offset) - 1
        return SpanPlace(file, offset - self.starts[file])

    def __len__(self) -> int:
        return len(self.spans)


def right_mask(spans: Sequence[Span], raw: bytes | memoryview) -> int:
    """Return the mask of the spans whose bytes, end to end in ``raw``, match their digests."""
    view, at, mask = memoryview(raw), 0, 0
    for number, span in enumerate(spans):
        mask |= (digest_of(view[at : at + span.size]) == span.digest) << number
        at += span.size
    return mask


def is_path(path: str) -> bool:
    """Return True if a path may name a file of a policy: relative, inside, the same on every
    system.

    Hidden names are refused too: a policy that is pulled into a home folder must not bring an
    ``.ssh``.
    """
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return False
    return (
        # Bytes of one file's path in UTF-8.
        0 < len(raw) <= 512
        and not re.search(r'[\x00-\x1f\x7f\\:*?"<>|]', path)
        and all(
            name
            and not name.startswith((".", " "))
            and not name.endswith((".", " "))
            and len(name.encode()) <= MAX_NAME
            for name in path.split("/")
        )
    )


def clash(paths: Sequence[str]) -> str | None:
    """Return a path that occurs twice or is a folder of another; None if all can exist
    together.

    Letters that differ in case only, or that are composed of other code points, are the same to
    some file systems.
    """
    seen: dict[str, None] = {}
    folded = [unicodedata.normalize("NFD", path).casefold() for path in paths]
    for path, name in zip(paths, folded, strict=True):
        if name in seen:
            return path
        seen[name] = None
    for path, parent in zip(paths, folded, strict=True):
        while (cut := parent.rfind("/")) > 0:
            parent = parent[:cut]
            if parent in seen:
                return path
    return None


def decode_index_untrusted(data: bytes, digest: bytes, count: int, size: int) -> Index:
    """Decode the index that a manifest names: with this digest, and ``count`` spans of ``size``
    bytes in all.

    Raises:
        BadMessage: The bytes are another index, or none. Nothing else is raised.
    """
    if len(data) > MAX_INDEX or digest_of(data) != digest:
        raise BadMessage("not the index that the manifest names")
    files, at = _decode_files_untrusted(data)
    if len(data) - at != count * _SPAN.size:
        raise BadMessage("an index has not as many spans as the manifest says")
    spans = tuple(Span(*fields) for fields in _SPAN.iter_unpack(memoryview(data)[at:]))
    if not all(
        0 < span.size <= MAX_SPAN
        and span.kind in (0, 2, 4)
        and (not span.kind or span.size % span.kind == 0)
        for span in spans
    ):
        raise BadMessage("a span's size or kind is out of bounds")
    index = Index._made(files, spans, data, digest)
    ends = set(index.offsets)
    if index.size != size or not all(start in ends for start in (*index.starts, size)):
        raise BadMessage("an index does not add up to what the manifest says")
    if index.starts[-1] + files[-1].size != size:
        raise BadMessage("an index has more spans than its files have bytes")
    return index


def _decode_files_untrusted(data: bytes) -> tuple[tuple[PolicyFile, ...], int]:
    """Return the files of an index and the offset of its spans, or raise `BadMessage`."""
    if len(data) < _COUNT.size:
        raise BadMessage("an index is cut off")
    (count,) = _COUNT.unpack_from(data)
    if not 0 < count <= MAX_FILES:
        raise BadMessage(f"a policy of {count} files is over the limit of {MAX_FILES}, or none")
    files: list[PolicyFile] = []
    at = _COUNT.size
    for _ in range(count):
        if at + _FILE.size > len(data):
            raise BadMessage("an index is cut off")
        length, size = _FILE.unpack_from(data, at)
        at += _FILE.size
        raw = data[at : at + length]
        at += length
        if len(raw) != length or at > _COUNT.size + MAX_FILE_TABLE or size > MAX_SIZE:
            raise BadMessage("a file of an index is cut off, or out of bounds")
        try:
            files.append(PolicyFile(raw.decode(), size))
        except UnicodeDecodeError:
            raise BadMessage("a path is not UTF-8") from None
    check_paths_untrusted([file.path for file in files])
    return tuple(files), at


def check_paths_untrusted(paths: Sequence[str]) -> None:
    """Check that ``paths`` can be the files of one policy; raise `BadMessage`, and nothing
    else, if not."""
    if list(paths) == [""]:
        return  # a policy that is one file
    for path in paths:
        if not is_path(path):
            raise BadMessage(f"{path!r} is no path of a policy's file")
    if list(paths) != sorted(paths):
        raise BadMessage("the files of an index are not in order")
    twice = clash(paths)
    if twice is not None:
        raise BadMessage(f"{twice!r} is there twice, or within a file")
