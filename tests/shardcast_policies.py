"""Policies made in memory, for tests of SHARDCAST that need no trainer."""

from __future__ import annotations

from p2p.shardcast.codec import encode_chunk
from p2p.shardcast.index import Index, PolicyFile, Span, digest_of
from p2p.shardcast.layout import cut_file


def pack_policy(raw: bytes, span: int) -> tuple[Index, list[bytes]]:
    """The index of a policy that is one file, and its chunks."""
    spans, wires, at = [], [], 0
    for cut in cut_file(len(raw), (), span):
        piece = raw[at : at + cut.size]
        spans.append(Span(digest_of(piece), cut.size))
        wires.append(encode_chunk(spans[-1], piece))
        at += cut.size
    return Index.of([PolicyFile("", len(raw))], spans), wires


def index_of(data: list[bytes]) -> Index:
    """The index of a policy whose spans are ``data``."""
    spans = [Span(digest_of(piece), len(piece)) for piece in data]
    return Index.of([PolicyFile("", sum(map(len, data)))], spans)
