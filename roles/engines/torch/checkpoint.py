"""A learner's state on disk: named tensors behind a digest, two generations.

A checkpoint of a model of 135 M parameters has 1.6 GB (weights and two moments in float32). So
it is written and read tensor by tensor: as a safetensors file, behind `SEAL` and the SHA-256
of all that follows, by which a single flipped bit is noticed. Nothing in it can be executed.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from p2p.errors import BadMessage
from p2p.naming import derived
from roles.engines.adapters import DIGEST_BYTES, SEAL
from roles.engines.base import EngineError
from roles.engines.torch.files import sync_folder
from roles.models import safetensors

_DTYPES: Final = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_TORCH: Final = {name: dtype for dtype, name in _DTYPES.items()}


def write_checkpoint(path: Path, previous: Path, tensors: Mapping[str, Tensor]) -> None:
    """Put ``tensors`` at ``path``, atomically and durably. The file that was there is kept at
    ``previous``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(derived(path.name, after=".partial"))
    with unfinished.open("wb") as file:
        file.write(SEAL + bytes(DIGEST_BYTES))
        digest = hashlib.sha256()
        for part in _parts(tensors):
            digest.update(part)
            file.write(part)
        file.seek(len(SEAL))
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        path.replace(previous)
        sync_folder(previous)
    unfinished.replace(path)
    sync_folder(path)


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield safetensors.encode_head(
        {name: (_DTYPES[one.dtype], tuple(one.shape)) for name, one in tensors.items()}
    )
    for one in tensors.values():
        yield one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Return the tensors that `write_checkpoint` wrote. Raises `EngineError` if a bit has
    changed since."""
    with path.open("rb") as file:
        if file.read(len(SEAL)) != SEAL:
            raise EngineError(
                f"the checkpoint {path} is damaged: it does not begin as a checkpoint does"
            )
        # A private mapping: pages come as they are read, and are nobody else's.
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[len(SEAL) :]
    digest, body = view[:DIGEST_BYTES], view[DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise EngineError(
            f"the checkpoint {path} is damaged: its content does not have the digest that it"
            " was written with"
        )
    try:
        raw = safetensors.decode_untrusted(body)
    except BadMessage as error:
        raise EngineError(f"{path} is no checkpoint of this engine: {error}") from error
    return {
        name: torch.frombuffer(one.data, dtype=_TORCH[one.dtype]).view(one.shape)
        for name, one in raw.items()
    }
