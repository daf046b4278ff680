"""The listing of the PyPI package shardcast 0.3.2 (`shardcast/utils.py`), both ways.

``distribution.txt`` has a line per version, ``v7: <blake3 of the file, hex>|<shards>``, oldest
first. Version 7's shards are ``v7/shard_00001.bin`` and so on: the file cut at multiples of a
size that is nowhere said, all equal but the last. Every client fetches ``data1.bin`` once when
it starts, to time the server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from p2p.errors import BadMessage
from p2p.policy import PolicyVersion
from p2p.shardcast.index import DIGEST_BYTES
from p2p.wire import KI

LISTING: Final = "distribution.txt"
PROBE: Final = "data1.bin"
"""Path of a file with which clients time a server. They discard its content."""
PROBE_BYTES: Final = 64 * KI
"""Size of our probe: enough to tell a slow line from a fast one, and 5 ms at 100 Mbit/s."""
SHARD_BYTES: Final = 50_000_000
"""Bytes of a shard that we serve: shardcast's own default."""
MAX_LISTING: Final = 64 * KI
"""Bytes of a listing that is read: 800 lines. Origins keep five versions by default."""
MAX_SHARDS: Final = 99_999
"""Most shards of one version that are believed: what five digits in a shard's name can express,
5 TB at the default size. A listing is foreign input, and room is made for as many as it
claims."""
_LINE: Final = re.compile(r"v(\d{1,9})\s*:\s*([0-9a-f]{64})\|(\d{1,9})", re.ASCII)
_SHARD: Final = re.compile(r"v(\d{1,9})/shard_(\d{5})\.bin", re.ASCII)


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of the listing: a complete version, the digest of its file, and its shards."""

    version: PolicyVersion
    digest: bytes
    shards: int

    def __str__(self) -> str:
        return f"v{self.version}: {self.digest.hex()}|{self.shards}"


def shard_count(size: int) -> int:
    """Return the number of shards of a file of ``size`` bytes. An empty file has one, so that
    clients have one to ask for."""
    return max(1, -(-size // SHARD_BYTES))


def shard_path(version: int, shard: int) -> str:
    """Return the path of a version's shard, where ``shard`` counts from 0."""
    return f"v{version}/shard_{shard + 1:05d}.bin"


def parse_shard_path_untrusted(path: str) -> tuple[PolicyVersion, int] | None:
    """Return the (version, shard from 0) that a path names; None if it names none."""
    match = _SHARD.fullmatch(path)
    if match is None or int(match[2]) == 0:
        return None
    return PolicyVersion(int(match[1])), int(match[2]) - 1


def encode_listing(entries: Iterable[Listed]) -> bytes:
    """Return the bytes of ``distribution.txt``, oldest version first."""
    lines = sorted(entries, key=lambda entry: entry.version)
    return "".join(f"{entry}\n" for entry in lines).encode()


def decode_listing_untrusted(data: bytes) -> list[Listed]:
    """Return a server's listing, newest first. Raises `BadMessage`, and nothing else.

    A line that says nothing about a version (an empty one, a comment of a later shardcast) is
    passed over, as shardcast's own client does; a version with two lines is refused.
    """
    if len(data) > MAX_LISTING:
        raise BadMessage(f"a listing of {len(data)} bytes is over the limit of {MAX_LISTING}")
    entries: dict[int, Listed] = {}
    for line in data.decode("ascii", "replace").splitlines():
        if not line.strip() or not line.lstrip().startswith("v"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise BadMessage(f"a line of {LISTING} that cannot be read: {line.strip()[:80]!r}")
        version, digest, shards = int(match[1]), bytes.fromhex(match[2]), int(match[3])
        if version in entries:
            raise BadMessage(f"{LISTING} lists version {version} twice")
        if not 0 < shards <= MAX_SHARDS or len(digest) != DIGEST_BYTES:
            raise BadMessage(f"version {version} has {shards} shards; 1 to {MAX_SHARDS} can be")
        entries[version] = Listed(PolicyVersion(version), digest, shards)
    return sorted(entries.values(), key=lambda entry: entry.version, reverse=True)
