"""Adapters of strangers are judged, and what they come to is right or not."""

from __future__ import annotations

import contextlib

from hypothesis import given, strategies as st

from p2p.errors import BadMessage
from p2p.shardcast.adapter import (
    AdapterFile,
    Piece,
    Target,
    merge_run_untrusted,
    read_adapter_untrusted,
)
from p2p.shardcast.index import Span, digest_of
from p2p.shardcast.layout import Tensor, tensors_untrusted
from p2p.shardcast.patch import SpanRun


@given(st.binary(max_size=600), st.binary(max_size=9))
def test_adapters_are_judged_whatever_they_are(header: bytes, terms: bytes) -> None:
    target = b'{"a.weight":{"dtype":"BF16","shape":[4,2],"data_offsets":[0,16]}}'
    policy = [tensors_untrusted(target, 8 + len(target) + 16)]
    good = (
        b'{"a.lora_A":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"a.lora_B":{"dtype":"F32"'
        b',"shape":[4,1],"data_offsets":[8,24]},"lora":{"dtype":"F32","shape":[2],"data_offsets":'
        b"[24,32]}}"
    )
    at = len(header) % len(good)
    for data in (header, good, good[:at] + header[:3] + good[at + 3 :]):
        with contextlib.suppress(BadMessage):
            found = tensors_untrusted(data, 8 + len(data) + 32)
            read_adapter_untrusted("a", found, terms, policy)


@given(st.binary(min_size=8, max_size=8), st.binary(min_size=16, max_size=16))
def test_sums_of_any_bits_are_right_or_not(down: bytes, up: bytes) -> None:
    run, span = SpanRun(0, 1, 16, 2), Span(digest_of(bytes(16)), 16, 2)
    factor = Tensor(0, 16, 4, dtype="F32")
    target = Target(0, Tensor(0, 16, 2, dtype="BF16"), factor, factor)
    piece = Piece(0, 16, 0, down, up, target, AdapterFile("", 1e30, 1, (target,)))
    raw, mask = merge_run_untrusted(run, [span], bytes(16), [piece])
    assert mask == (raw == bytes(16))
