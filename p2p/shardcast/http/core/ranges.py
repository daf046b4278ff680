"""Which bytes a request asks for: RFC 9110, sections 13.1 and 14, for one range.

A request for several ranges at once gets the whole body, as section 14.2 allows: the answer
would be a multipart body that no downloader of weights asks for, and overlapping ranges are an
old way to make a server send much for little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_HEADER: Final = 1024
"""Longest header, in characters, that is parsed: a range has at most 45, twelve tags have
800."""
_RANGE: Final = re.compile(r"bytes=\s*(?:(\d{1,18})-(\d{1,18})?|-(\d{1,18}))\s*", re.ASCII)
"""Matches a single byte range. Eighteen digits express up to 10^18 - 1, more than any disk has
and yet bounded."""
_TAG: Final = re.compile(r'(?:W/)?"([\x21\x23-\x7e]{0,200})"', re.ASCII)


class RangeNotSatisfiable(Exception):
    """The first byte that is asked for lies behind the end."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start`` to ``end`` (exclusive) of a body."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def content_range(self, size: int) -> str:
        """Return the Content-Range header of an answer with part of ``size`` bytes."""
        return f"bytes {self.start}-{self.end - 1}/{size}"


def parse_range_untrusted(value: str, size: int) -> ByteRange | None:
    """Return the one range of a body of `size` bytes that a Range header asks for; None if the
    answer is the whole body (several ranges, another unit, nonsense).

    Raises `RangeNotSatisfiable` if there is no such byte.
    """
    match = _RANGE.fullmatch(value) if len(value) <= MAX_HEADER else None
    if match is None:
        return None
    first, last, suffix = match.groups()
    if suffix is not None:
        start, end = max(0, size - int(suffix)), size
    else:
        start, end = int(first), size if last is None else min(int(last) + 1, size)
        if last is not None and int(last) < start:
            return None  # section 14.1.1: such a range is invalid, and as if it were not there
    if start >= end:
        raise RangeNotSatisfiable
    return ByteRange(start, end)


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
    return header.strip() == "*" or tag.strip('"') in _TAG.findall(header)
