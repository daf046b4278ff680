"""A delta between two policies as one file: runs of spans, each coded alone, and their table.

Two policies have a delta if they are laid out alike: the same files, cut in the same spans of
the same kinds. Consecutive spans of one file and kind are a *run*. The patch is the deltas of
all runs (`p2p.shardcast.delta`), then a table, so that it is written from its front while runs
are still being coded::

    patch   delta of each run, (u32 spans, u32 wire bytes) per run, index of the new policy,
            digest of the base's index (32 bytes), u32 runs, u32 bytes of the index

A patch travels as a policy of one file does: cut in chunks that are believed by their digest
and passed on before they are understood, in files of its own on each disk. The index in it says
what comes out: every span is compared with its digest, and one that is wrong is fetched as it
is in the policy itself.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from p2p.errors import BadMessage
from p2p.shardcast.delta import decode_delta_untrusted, encode_delta
from p2p.shardcast.index import DIGEST_BYTES, MAX_CHUNKS, MAX_INDEX, Index, Span, right_mask
from p2p.wire import MIB

MAX_RUN: Final = 8 * MIB
"""Most raw bytes of one run. Each core has the old and the new bytes of a run in memory while
it codes the run. It is two segments of bf16; half of it costs nothing yet, a quarter 2.5 % more
bytes."""
_ROW: Final = struct.Struct(">II")
TAIL: Final = struct.Struct(f">{DIGEST_BYTES}sII")
Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class SpanRun:
    """Consecutive spans of one file and one kind."""

    first: int
    end: int
    """One beyond the last span of the run."""
    size: int
    kind: int


@dataclass(frozen=True, slots=True)
class PatchRun:
    """A run of spans, and the place of its delta in the patch."""

    run: SpanRun
    offset: int
    wire: int


@dataclass(frozen=True, slots=True)
class PatchTable:
    """The table of a patch: its base, the index that it leads to, and its runs."""

    base: bytes
    """Digest of the index of the base policy."""
    index: bytes
    """Encoded index of the policy that the patch leads to, not yet validated."""
    rows: tuple[tuple[int, int], ...]
    """Number of spans and of wire bytes of each run."""


def is_alike(one: Index, other: Index) -> bool:
    """Return True if the two policies are laid out alike, so that a delta between them can
    exist."""
    return one.files == other.files and [(span.size, span.kind) for span in one.spans] == [
        (span.size, span.kind) for span in other.spans
    ]


def runs_of(index: Index) -> list[SpanRun]:
    """Group the spans of a policy into runs as long as allowed."""
    runs: list[SpanRun] = []
    starts = set(index.starts)
    for number, span in enumerate(index.spans):
        last = runs[-1] if runs else None
        if (
            last is None
            or last.kind != span.kind
            or last.size + span.size > MAX_RUN
            or index.offsets[number] in starts
        ):
            runs.append(SpanRun(number, number + 1, span.size, span.kind))
        else:
            runs[-1] = SpanRun(last.first, number + 1, last.size + span.size, span.kind)
    return runs


def encode_run(run: SpanRun, spans: Sequence[Span], old: Bytes, new: Bytes) -> bytes | None:
    """Return the delta of one run; None if ``old`` does not match the ``spans`` of the base, or
    if either file was cut short meanwhile."""
    if (
        len(old) != run.size
        or len(new) != run.size
        or right_mask(spans, old) != (1 << len(spans)) - 1
    ):
        return None
    return encode_delta(old, new, run.kind)


def encode_table(
    base: Index, index: Index, runs: Sequence[SpanRun], wires: Sequence[int]
) -> bytes:
    """Return the table that follows the deltas, whose sizes are ``wires``."""
    rows = [_ROW.pack(run.end - run.first, wire) for run, wire in zip(runs, wires, strict=True)]
    tail = TAIL.pack(base.digest, len(runs), len(index.data))
    return b"".join([*rows, index.data, tail])


def table_bytes_untrusted(tail: bytes, size: int) -> int:
    """Return the bytes of the table, tail included, of a patch of ``size`` bytes. Raise
    `BadMessage` if it can have none."""
    if len(tail) != TAIL.size:
        raise BadMessage("a patch is cut off")
    _, runs, length = TAIL.unpack(tail)
    table: int = runs * _ROW.size + length + TAIL.size
    most = MAX_CHUNKS * _ROW.size + MAX_INDEX + TAIL.size  # 3.1 MiB
    if not 0 < runs <= MAX_CHUNKS or table > min(size, most):
        raise BadMessage(f"a patch of {size} bytes has a table of {table} for {runs} runs")
    return table


def decode_table_untrusted(data: bytes) -> PatchTable:
    """Decode the table of a patch, as long as `table_bytes_untrusted` says. Raise `BadMessage`
    if it is malformed."""
    base, runs, length = TAIL.unpack(data[-TAIL.size :])
    if len(data) != runs * _ROW.size + length + TAIL.size:
        raise BadMessage("a patch's table is cut off")
    end = runs * _ROW.size
    rows = tuple(_ROW.iter_unpack(data[:end]))
    return PatchTable(base, data[end : end + length], rows)


def patch_runs_untrusted(table: PatchTable, index: Index, room: int) -> list[PatchRun]:
    """Return the runs of a patch to the policy of ``index``, whose deltas have ``room`` bytes.
    Raise `BadMessage` if the table does not fit them."""
    found: list[PatchRun] = []
    first = offset = 0
    starts = set(index.starts)
    for count, wire in table.rows:
        spans = index.spans[first : first + count]
        size = sum(span.size for span in spans)
        kinds = {span.kind for span in spans}
        if len(spans) != count or len(kinds) != 1 or size > MAX_RUN:
            raise BadMessage(f"a run of {count} spans of {len(kinds)} kinds, of {size} bytes")
        if any(index.offsets[number] in starts for number in range(first + 1, first + count)):
            raise BadMessage("a run in two files")
        run = SpanRun(first, first + count, size, kinds.pop())
        found.append(PatchRun(run, offset, wire))
        first, offset = first + count, offset + wire
    if first != len(index) or offset != room:
        raise BadMessage(f"runs of {first} spans in {offset} bytes")
    return found


def apply_run_untrusted(
    run: SpanRun, spans: Sequence[Span], old: Bytes, wire: Bytes
) -> tuple[bytes, int]:
    """Apply a run; return its bytes, and the mask of ``spans`` that are right.

    All spans are wrong if the delta is malformed, because its publisher signed nonsense or the
    base has changed. Nodes that then pull the spans themselves find out which.
    """
    try:
        raw = decode_delta_untrusted(old, wire, run.size, run.kind)
    except BadMessage:
        return b"", 0
    return raw, right_mask(spans, raw)
