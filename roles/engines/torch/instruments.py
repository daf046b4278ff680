"""Draws, replays and activation proofs, computed on the device that holds logits and states.

On the CPU that is `proofs`, whose numpy is made for its caches; on a GPU the same arithmetic in
torch, of which only a few numbers a token come back. Both give the same noise and the same
proofs to the bit, and the same tokens but for those within 1e-6 of a border.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofs import draws, toploc
from proofs.draws import DrawnTokens, Replay
from proofs.sampling import DrawRule, Words
from roles.engines.torch.device_draws import draw_on_device, replay_on_device

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer]

_KEYS: Final = 1 << 22
"""Number of states ranked at once, 8 bytes each in about three tensors: 100 MB of the device's
memory."""


class Instruments(Protocol):
    """Measurements of logits and states."""

    def replay(
        self, logits: Any, tokens: Tokens, words: Words, temperature: float, rule: DrawRule
    ) -> Replay:
        """Replay as `proofs.draws.replay` does, from logits that `view` gave."""
        ...

    def top_values(self, values: int) -> toploc.TopValues:
        """Return a `proofs.toploc.TopValues` that takes states that `view` gave."""
        ...

    def view(self, tensor: Tensor) -> Any:
        """Return a tensor in the form that `replay` and `top_values` take."""
        ...

    def draw(
        self, logits: Tensor, words: Words, temperature: float, rule: DrawRule
    ) -> DrawnTokens:
        """Draw as `proofs.draws.draw` does."""
        ...

    def commit(self, chunks: Sequence[Tensor], values: int) -> list[bytes]:
        """Commit as `proofs.toploc.commit` does, to at most one chunk each."""
        ...


class HostInstruments:
    """Measurements in numpy, for tensors on any device."""

    def replay(
        self, logits: Any, tokens: Tokens, words: Words, temperature: float, rule: DrawRule
    ) -> Replay:
        return draws.replay(logits, tokens, words, temperature, rule)

    def top_values(self, values: int) -> toploc.TopValues:
        return toploc.TopValues(values)

    def view(self, tensor: Tensor) -> Any:
        """Return the tensor as a numpy array; on the CPU it shares the memory."""
        return tensor.cpu().numpy()

    def draw(
        self, logits: Tensor, words: Words, temperature: float, rule: DrawRule
    ) -> DrawnTokens:
        return draws.draw(self.view(logits), words, temperature, rule)

    def commit(self, chunks: Sequence[Tensor], values: int) -> list[bytes]:
        return toploc.commit([self.view(rows) for rows in chunks], values)


class DeviceInstruments:
    """Measurements in torch, on the device of each tensor, which must support float64."""

    def replay(
        self, logits: Any, tokens: Tokens, words: Words, temperature: float, rule: DrawRule
    ) -> Replay:
        return replay_on_device(logits, tokens, words, temperature, rule)

    def top_values(self, values: int) -> toploc.TopValues:
        return DeviceTopValues(values)

    def view(self, tensor: Tensor) -> Any:
        """Return the tensor itself."""
        return tensor

    def draw(
        self, logits: Tensor, words: Words, temperature: float, rule: DrawRule
    ) -> DrawnTokens:
        return draw_on_device(logits, words, temperature, rule)

    def commit(self, chunks: Sequence[Tensor], values: int) -> list[bytes]:
        return toploc.commit(rank_chunks(chunks, values), values)


def instruments_for(device: torch.device) -> Instruments:
    """Return the instruments of a device. MPS takes those of the CPU, since it shares memory
    with the CPU and has no float64."""
    return HostInstruments() if device.type in ("cpu", "mps") else DeviceInstruments()


class DeviceTopValues(toploc.TopValues):
    """`proofs.toploc.TopValues` for tensors."""

    def __init__(self, values: int = toploc.TOP_K) -> None:
        super().__init__(values)
        self._begun: list[Tensor] = []
        self._begun_rows = 0

    def add(self, rows: Any) -> None:
        """Add the next rows, (tokens, width) in float32 on a device."""
        self._begun.append(rows)
        self._begun_rows += len(rows)
        if self._begun_rows >= toploc.ROWS_PER_CHUNK:
            joined = torch.cat(self._begun)
            whole = len(joined) // toploc.ROWS_PER_CHUNK * toploc.ROWS_PER_CHUNK
            chunks = torch.split(joined[:whole], toploc.ROWS_PER_CHUNK)
            for chunk in rank_chunks(chunks, self.values):
                self.extend(chunk)
            # a copy: the rows may be a window of something large
            self._begun, self._begun_rows = [joined[whole:].clone()], len(joined) - whole

    def close_all(self, others: Sequence[toploc.TopValues]) -> None:
        """Rank the last chunks of all completions, which may be shorter, in one pass. A call on
        a GPU costs the same for one chunk as for hundreds: called for each chunk, it took a
        third of the replay of answers of 24 tokens."""
        begun = [one for one in others if isinstance(one, DeviceTopValues) and one._begun_rows]
        chunks = rank_chunks([torch.cat(one._begun) for one in begun], self.values)
        for one, last in zip(begun, chunks, strict=True):
            one.extend(last)
            one._begun, one._begun_rows = [], 0


def rank_chunks(chunks: Sequence[Tensor], values: int) -> list[toploc.TopValues]:
    """Return the largest values of chunks of at most 32 rows, each (rows, width) in float32:
    one `toploc.TopValues` for each."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for number, chunk in enumerate(chunks):
        by_shape.setdefault(tuple(chunk.shape), []).append(number)
    found: dict[int, toploc.TopValues] = {}
    for (rows, width), numbers in by_shape.items():
        size = max(1, _KEYS // (rows * width))
        for start in range(0, len(numbers), size):
            some = numbers[start : start + size]
            block = torch.stack([chunks[number] for number in some]).flatten(1)
            indices, patterns = _largest(block, min(values, rows * width))
            for number, where, what in zip(some, indices, patterns, strict=True):
                found[number] = toploc.TopValues(values)
                found[number].take(rows, rows * width, where, what)
    return [found[number] for number in range(len(chunks))]


def _largest(block: Tensor, k: int) -> tuple[Any, Any]:
    """Return indices and bfloat16 patterns as `proofs.toploc.largest` does, each (rows, k), in
    numpy.

    The key is an int64 that orders by magnitude and, among equals, by the lower index. No two
    keys are equal, so every device ranks alike.
    """
    bits = block.contiguous().view(torch.int32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    rounded = torch.where((bits & 0x7FFF_FFFF) > 0x7F80_0000, 0x7FC0, rounded)
    last = block.shape[1] - 1
    places = torch.arange(last, -1, -1, dtype=torch.int64, device=block.device)
    keys = ((rounded & 0x7FFF).long() << 32) + places
    top = keys.topk(k, dim=1).values
    indices = last - (top & 0xFFFF_FFFF)
    found = torch.stack([indices, rounded.gather(1, indices).long()]).cpu().numpy()
    return found[0].astype(np.uint32), found[1].astype(np.uint16)
