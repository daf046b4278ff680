"""Encodings of a contribution: float32 values as fewer bits, in blocks that each have a scale.

Theory of operation
-------------------
A block of values is divided by a scale, its largest magnitude over the largest code, and
rounded. The scale is bfloat16, rounded up so that no code exceeds its range. A block protects
its neighbours: one outlier coarsens 128 or 256 values, where a scale for the whole vector (as
PRIME had it) loses a third of a heavy-tailed gradient.

Encoded values are the scales of all blocks, then all codes. The two are as long as the number
of values says, so a decoder knows the length of what it reads beforehand. What no encoder
writes is refused: scales that are infinite, negative or no numbers, the code that two's
complement has below the range, padding that is not zero. So a decoded value is always finite.

Encoding, decoding and adding are separate operations of numpy on float32, each rounded as IEEE
754 has it: every machine gets the same bits.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from p2p.errors import BadMessage
from roles.contract.core.diloco import Codec

Values: TypeAlias = NDArray[np.float32]
"""A float32 vector."""

INT8_BLOCK: Final = 256
"""Values that share a scale. 8.06 bits a value; a tail of Student's t with 3 degrees of freedom
costs 1.7 % there, and 32 % under one scale for all."""
INT4_BLOCK: Final = 128
"""Values that share a scale. 4.13 bits a value; blocks of 64 would save a tenth of the error
for a thirtieth of the bytes."""
ALIGNMENT: Final = 256
"""Pieces of a vector begin at multiples of this many values, so that no block is cut."""
MAX_SCALE: Final = 1e30
"""Scales beyond it are refused: a sum of a few hundred such values would still be finite, and
no weight of a model that learns changes by as much."""


_LARGEST: Final = {Codec.INT8: 127, Codec.INT4: 7}
_BLOCKS: Final = {Codec.INT8: INT8_BLOCK, Codec.INT4: INT4_BLOCK}


def encoded_bytes(codec: Codec, count: int) -> int:
    """Return how many bytes ``count`` values take when encoded."""
    if codec is Codec.FP32:
        return 4 * count
    codes = count if codec is Codec.INT8 else (count + 1) // 2
    return 2 * _blocks(count, _BLOCKS[codec]) + codes


def encode(codec: Codec, values: Values) -> bytes:
    """Encode ``values`` for the wire.

    Raises:
        ValueError: A value is not finite, or too large for its scale.
    """
    if values.size and not np.isfinite(values).all():
        raise ValueError("a value that is NaN or infinite cannot be encoded")
    if codec is Codec.FP32:
        return values.astype("<f4").tobytes()
    scales, codes = _encode_blocks(codec, values)
    return scales.tobytes() + (_packed(codes) if codec is Codec.INT4 else codes.tobytes())


def decode_untrusted(codec: Codec, data: bytes | memoryview, count: int) -> Values:
    """Decode ``count`` values, all finite. Raise `BadMessage`, and nothing else, whatever the
    bytes."""
    if len(data) != encoded_bytes(codec, count):
        raise BadMessage(
            f"{count} values in {codec.value} are {encoded_bytes(codec, count)} bytes, not"
            f" {len(data)}"
        )
    if codec is not Codec.FP32:
        return _decode_blocks(codec, data, count)
    values = np.frombuffer(data, "<f4").astype(np.float32)
    if values.size and not float(np.abs(values).max()) <= MAX_SCALE:
        raise BadMessage("an encoded value is NaN, infinite or beyond all reason")
    return values


def _encode_blocks(codec: Codec, values: Values) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    block, largest = _BLOCKS[codec], np.float32(_LARGEST[codec])
    padded = np.zeros(_blocks(values.size, block) * block, np.float32)
    padded[: values.size] = values
    rows = padded.reshape(-1, block)
    peaks = np.maximum(np.abs(rows.max(axis=1)), np.abs(rows.min(axis=1)))
    scales = _bf16_up(peaks / largest)
    wide = _widened(scales)
    if wide.size and float(wide.max()) > MAX_SCALE:
        raise ValueError(f"a value is too large to be encoded in {codec.value}")
    divisors = np.where(wide > 0, wide, np.float32(1))
    codes = np.rint(rows / divisors[:, None]).astype(np.int8)
    return scales, codes.reshape(-1)[: values.size]


def _decode_blocks(codec: Codec, data: bytes | memoryview, count: int) -> Values:
    block, largest = _BLOCKS[codec], _LARGEST[codec]
    number = _blocks(count, block)
    scales = _widened(np.frombuffer(data, "<u2", number))
    # The comparison is false for NaN. Minus zero is another form of zero, and none of ours.
    if number and not (float(scales.max()) <= MAX_SCALE and not np.signbit(scales).any()):
        raise BadMessage("a scale is NaN, infinite, negative or beyond all reason")
    if codec is Codec.INT4:
        codes = _unpacked_untrusted(np.frombuffer(data, np.uint8, offset=2 * number), count)
    else:
        codes = np.frombuffer(data, np.int8, offset=2 * number)
    if count and int(codes.min()) < -largest:
        raise BadMessage(f"a code of {codec.value} is below -{largest}")
    values = np.zeros(number * block, np.float32)
    values[:count] = codes
    values.reshape(-1, block)[...] *= scales[:, None]
    return values[:count]


def _packed(codes: NDArray[np.int8]) -> bytes:
    """Pack two codes in each byte, the first in the low half, each stored as its value plus
    8."""
    halves = np.full(codes.size + codes.size % 2, 8, np.uint8)
    halves[: codes.size] = (codes + np.int8(8)).view(np.uint8)
    return (halves[0::2] | halves[1::2] << 4).tobytes()


def _unpacked_untrusted(packed: NDArray[np.uint8], count: int) -> NDArray[np.int8]:
    halves = np.empty(2 * packed.size, np.uint8)
    halves[0::2] = packed & 15
    halves[1::2] = packed >> 4
    if halves.size > count and halves[-1] != 8:
        raise BadMessage("the padding of an odd number of codes is not zero")
    return halves[:count].view(np.int8) - np.int8(8)


def _bf16_up(magnitudes: Values) -> NDArray[np.uint16]:
    """Round magnitudes up to bfloat16. Values below 0 are not supported."""
    bits = np.ascontiguousarray(magnitudes, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) >> np.uint32(16)).astype("<u2")


def _widened(halves: NDArray[np.uint16]) -> Values:
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _blocks(count: int, block: int) -> int:
    return -(-count // block)
