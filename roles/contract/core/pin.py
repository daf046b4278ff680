"""Pins of a model's files, which a run's owner signs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

REQUIRED: Final = ("config.json", "tokenizer.json")
"""Files that every folder of a model has."""
OPTIONAL: Final = (
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "model.safetensors.index.json",
)
"""Further files, beside the weights, that change what is computed or asked. A file that is
there counts, pinned or not: a template of its own comes before that in
``tokenizer_config.json``."""
WEIGHTS_SUFFIX: Final = ".safetensors"
"""Suffix of files of weights, which differ from policy to policy."""
CAPSULE_SUFFIX: Final = ".capsule"
"""Suffix of environments that every policy carries (`roles.envs.capsule`)."""
MAX_CAPSULE: Final = 4 * 1024 * 1024
"""Most bytes of a capsule."""


def counts(name: str) -> bool:
    """Return True if a file of this name is part of a policy: a run pins it. Other files of
    a model's folder (a README, a licence) stay where they are."""
    return (
        name in REQUIRED or name in OPTIONAL or name.endswith((WEIGHTS_SUFFIX, CAPSULE_SUFFIX))
    )


FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of files directly in the folder: no separator, and no leading dot."""
MAX_FILE: Final = 1 << 40
"""Most bytes of one file; shards have 5 to 50 GB."""
DIGEST_BYTES: Final = 32
"""Bytes of a SHA-256 digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePin:
    """One file of a model's folder."""

    name: str
    """Name in the folder."""

    size: int
    """Size in bytes."""

    digest: bytes
    """SHA-256 of the content."""

    def __post_init__(self) -> None:
        if not FILE_NAME.fullmatch(self.name):
            raise ValueError(
                "a file of a model is named with letters, digits, . _ and -, not"
                f" {self.name!r:.80}"
            )
        if not 0 < self.size <= MAX_FILE:
            raise ValueError(f"{self.name} must have 1 to {MAX_FILE:,} bytes, not {self.size}")
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"the digest of {self.name} is not {DIGEST_BYTES} bytes")
