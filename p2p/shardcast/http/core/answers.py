"""HTTP as pure functions: Host headers, ranges, bodies, archives, shardcast 0.3.2's listing.

*Host headers*, against DNS rebinding. What listens on loopback is for its own machine. A web
page that a person has open there is not: its server can let its own name lead to 127.0.0.1, and
the browser takes what is here for that server's. The name in the Host header stays that
server's.

*Ranges*: which bytes a request asks for (RFC 9110, sections 13.1 and 14). A request for several
ranges at once gets the whole body, as section 14.2 allows: the answer would be a multipart body
that no downloader of weights asks for, and overlapping ranges are an old way to make a server
send much for little.

*Archives*: many files as one tar archive, equal byte for byte on every machine that holds them.
Programs that know one file per version (shardcast 0.3.2, a browser) get a folder this way. The
headers are made from names and sizes alone: no owner, no time, mode 0644. So two nodes give the
same archive, and a download may begin at one and go on at another. Nothing is packed
beforehand: a `Body` finds each byte in the files as they lie.

*The listing* of the PyPI package shardcast 0.3.2 (`shardcast/utils.py`), both ways.
``distribution.txt`` has a line per version, ``v7: <blake3 of the file, hex>|<shards>``, oldest
first. Version 7's shards are ``v7/shard_00001.bin`` and so on: the file cut at multiples of a
size that is nowhere said, all equal but the last. Every client fetches ``data1.bin`` once when
it starts, to time the server.
"""

from __future__ import annotations

import re
import tarfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import accumulate
from typing import Final

from p2p.errors import BadMessage
from p2p.policy import PolicyVersion
from p2p.wire import KI


def machine_named(header: str) -> str | None:
    """Return the address, or localhost, that a Host header names; None for any other name."""
    pattern = r"(localhost|[\d.]{7,15}|\[[\da-fA-F:.]{2,45}\])(?::\d{1,5})?"
    match = re.fullmatch(pattern, header, re.ASCII)
    return None if match is None else match[1].strip("[]")


def is_loopback(name: str) -> bool:
    """Return True if ``name`` is an address that only this machine reaches, or localhost."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


MAX_HEADER: Final = 1024
"""Longest header, in characters, that is parsed: a range has at most 45, twelve tags have
800."""


def parse_range_untrusted(value: str, size: int) -> range | None:
    """Return the one range of a body of `size` bytes that a Range header asks for; None if the
    answer is the whole body (several ranges, another unit, nonsense). The range is empty if
    there is no such byte."""
    # Eighteen digits express more than any disk has, and yet are bounded.
    pattern = r"bytes=\s*(?:(\d{1,18})-(\d{1,18})?|-(\d{1,18}))\s*"
    match = re.fullmatch(pattern, value, re.ASCII) if len(value) <= MAX_HEADER else None
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        start, end = max(0, size - int(suffix)), size
    else:
        start, end = int(first), size if last is None else min(int(last) + 1, size)
        if last is not None and int(last) < start:
            return None  # section 14.1.1: such a range is invalid, and as if it were not there
    return range(start, end)


def etag(digest: bytes, what: str) -> str:
    """Return the strong entity tag of the thing called ``what`` in a release with this
    ``digest``.

    Half of the digest: 128 bits are enough that no two versions of one server share a tag.
    """
    return f'"{digest.hex()[:32]}-{what}"'


def has_tag_untrusted(header: str, tag: str) -> bool:
    """Return True if an If-None-Match header says that the client holds what ``tag`` names.

    Weak tags count too (section 13.1.2): equal digests are equal bytes.
    """
    if len(header) > MAX_HEADER:
        return False
    tags = re.findall(r'(?:W/)?"([\x21\x23-\x7e]{0,200})"', header, re.ASCII)
    return header.strip() == "*" or tag.strip('"') in tags


@dataclass(frozen=True, slots=True)
class Slice:
    """``length`` bytes of file number ``file`` of a version, from ``offset`` on."""

    file: int
    offset: int
    length: int


class Body:
    """A response body of known size, of which any part can be produced by itself."""

    def __init__(self, parts: Sequence[Slice | bytes]) -> None:
        self._parts = tuple(parts)
        lengths = (p.length if isinstance(p, Slice) else len(p) for p in parts)
        self._ends = tuple(accumulate(lengths))

    @property
    def size(self) -> int:
        """Total number of bytes."""
        return self._ends[-1] if self._ends else 0

    def pieces(self, start: int, end: int, most: int) -> Iterator[Slice | bytes]:
        """Return bytes ``start`` to ``end`` as pieces of at most ``most`` bytes."""
        part = bisect_right(self._ends, start)
        while start < end:
            first = self._ends[part - 1] if part else 0
            within = start - first
            count = min(most, end - start, self._ends[part] - start)
            source = self._parts[part]
            if count and isinstance(source, Slice):
                yield Slice(source.file, source.offset + within, count)
            elif count and isinstance(source, bytes):
                yield source[within : within + count]
            start += count
            part += start == self._ends[part]


def tar_of(files: Sequence[tuple[str, int]]) -> Body:
    """Return the archive of ``files`` (path, bytes), in their order.

    A path over 100 characters, or a file over 8 GiB, gets a pax header of its own, as GNU tar,
    BSD tar and Python read it.
    """
    parts: list[Slice | bytes] = []
    for number, (path, size) in enumerate(files):
        member = tarfile.TarInfo(path)
        header = {**member.get_info(), "size": size}
        parts.append(member.create_pax_header(header, "utf-8"))
        parts.append(Slice(number, 0, size))
        parts.append(bytes(-size % 512))  # blocks of 512 bytes (POSIX 1003.1, pax)
    parts.append(bytes(1024))  # two empty blocks end an archive
    return Body(parts)


LISTING: Final = "distribution.txt"
SHARD_BYTES: Final = 50_000_000
"""Bytes of a shard that we serve: shardcast's own default."""
MAX_LISTING: Final = 64 * KI
"""Bytes of a listing that is read: 800 lines. Origins keep five versions by default."""
MAX_SHARDS: Final = 99_999
"""Most shards of one version that are believed: what five digits in a shard's name can express,
5 TB at the default size. A listing is foreign input, and room is made for as many as it
claims."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of the listing: a complete version, the digest of its file, and its shards."""

    version: PolicyVersion
    digest: bytes
    shards: int


def shard_count(size: int) -> int:
    """Return the number of shards of a file of ``size`` bytes. An empty file has one, so that
    clients have one to ask for."""
    return max(1, -(-size // SHARD_BYTES))


def shard_path(version: int, shard: int) -> str:
    """Return the path of a version's shard, where ``shard`` counts from 0."""
    return f"v{version}/shard_{shard + 1:05d}.bin"


def parse_shard_path_untrusted(path: str) -> tuple[PolicyVersion, int] | None:
    """Return the (version, shard from 0) that a path names; None if it names none."""
    match = re.fullmatch(r"v(\d{1,9})/shard_(\d{5})\.bin", path, re.ASCII)
    if match is None or int(match[2]) == 0:
        return None
    return PolicyVersion(int(match[1])), int(match[2]) - 1


def encode_listing(entries: Iterable[Listed]) -> bytes:
    """Return the bytes of ``distribution.txt``, oldest version first."""
    lines = sorted(entries, key=lambda entry: entry.version)
    return "".join(f"v{o.version}: {o.digest.hex()}|{o.shards}\n" for o in lines).encode()


def decode_listing_untrusted(data: bytes) -> list[Listed]:
    """Return a server's listing, newest first. Raises `BadMessage`, and nothing else.

    A line that says nothing about a version (an empty one, a comment of a later shardcast) is
    passed over, as shardcast's own client does; a version with two lines is refused.
    """
    if len(data) > MAX_LISTING:
        raise BadMessage(f"a listing of {len(data)} bytes is over the limit of {MAX_LISTING}")
    entries: dict[int, Listed] = {}
    for line in data.decode("ascii", "replace").splitlines():
        if not line.lstrip().startswith("v"):
            continue
        pattern = r"v(\d{1,9})\s*:\s*([0-9a-f]{64})\|(\d{1,9})"
        match = re.fullmatch(pattern, line.strip(), re.ASCII)
        if match is None:
            raise BadMessage(f"a line of {LISTING} that cannot be read: {line.strip()[:80]!r}")
        version, digest, shards = int(match[1]), bytes.fromhex(match[2]), int(match[3])
        if version in entries:
            raise BadMessage(f"{LISTING} lists version {version} twice")
        if not 0 < shards <= MAX_SHARDS:
            raise BadMessage(f"version {version} has {shards} shards; 1 to {MAX_SHARDS} can be")
        entries[version] = Listed(PolicyVersion(version), digest, shards)
    return sorted(entries.values(), key=lambda entry: entry.version, reverse=True)
