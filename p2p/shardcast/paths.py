"""Which deltas there are, which of them a receiver takes, and what a holder can serve.

A trainer makes the delta from the version before, and at versions divisible by 2^j also from
2^j versions before: a *skip delta*. Whatever a receiver missed, it is then a few objects
behind. Example, at lr 1e-6 with coding by exponent: a receiver at version 16 that wants 32
takes one delta of 4.6 % of the policy, where the 16 single ones add up to 12 %; from 13 to 32
it takes 13→14, 14→16, 16→32. Each skip of 2^j is made once in 2^j versions, so all of them
together cost the trainer as much as one more delta per version.

A receiver takes the path that costs the fewest bytes: nodes are versions, edges are what
manifests offer. An anchor starts from nothing, a delta from its base. What is held costs
nothing more; what is being fetched costs what is left of it. So a joiner that has most of an
anchor when the next version comes out finishes it and takes a delta, instead of beginning
again.

The anchor of a version is never kept: each node that holds the version packs any span of it on
demand. So joiners are served by all who are up to date, and the origin is the last they ask.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from p2p.shardcast.manifest import NO_POLICY, Encoding, Manifest, PolicyVersion
from p2p.wire import KI

MAX_SKIP: Final = 6
"""The longest skip delta is over 2^6 versions. Each doubling costs 1.5 times the bytes
(measured up to 16): that one is about a tenth of the policy, a seventh of its anchor."""
HOP_BYTES: Final = 64 * KI
"""The cost of one more object on a path, in bytes: asking for its index, waiting, reading and
writing the whole policy once more. It favours fewer hops where deltas are small."""


@dataclass(frozen=True, slots=True)
class Hop:
    """One object to fetch: an encoding of a version."""

    manifest: Manifest
    encoding: Encoding

    @property
    def version(self) -> PolicyVersion:
        """The version that it leads to."""
        return self.manifest.version

    @property
    def name(self) -> bytes:
        """The digest by which messages name it."""
        return self.manifest.name_of(self.encoding)


@dataclass(frozen=True, slots=True)
class Path:
    """The objects that a receiver fetches, in order, to arrive at a version."""

    start: PolicyVersion
    """The version it holds or is fetching, from which the first hop leads on; `NO_POLICY` if
    the first is an anchor."""
    hops: tuple[Hop, ...]
    wire: int
    """Bytes to fetch, what is left of the start included."""


def delta_bases(
    version: PolicyVersion, previous: PolicyVersion, held: Container[PolicyVersion]
) -> list[PolicyVersion]:
    """The versions from which a trainer makes deltas to ``version``, the latest first.

    ``previous`` is the version it published before this one, ``held`` what it still has.
    """
    skips = [version - (1 << power) for power in range(1, MAX_SKIP + 1)]
    wanted = [previous, *(base for base in skips if version % (version - base) == 0)]
    return [
        PolicyVersion(base)
        for base in sorted(set(wanted), reverse=True)
        if NO_POLICY < base < version and base in held
    ]


def cheapest_path(
    target: Manifest,
    known: Iterable[Manifest],
    held: Mapping[PolicyVersion, int],
    without: Container[bytes] = (),
) -> Path:
    """The path to ``target`` that costs the fewest bytes.

    ``known`` are manifests of the same trainer, whose encodings may be hops; ``held`` gives for
    each version that is here or under way the bytes that are left of it; ``without`` names
    patches that no peer has.
    """
    offers: dict[PolicyVersion, list[Hop]] = {}
    for manifest in {one.version: one for one in [*known, target]}.values():
        for encoding in (manifest.anchor, *manifest.patches):
            if manifest.name_of(encoding) in without:
                continue
            offers.setdefault(encoding.base, []).append(Hop(manifest, encoding))
    ties = itertools.count()
    queue: list[tuple[int, int, Path, PolicyVersion]] = []
    for version, left in {NO_POLICY: 0, **held}.items():
        price = left + (HOP_BYTES if left else 0)
        heapq.heappush(queue, (price, next(ties), Path(version, (), left), version))
    reached: set[PolicyVersion] = set()
    while queue:
        price, _, path, version = heapq.heappop(queue)
        if version == target.version:
            return path
        if version in reached:
            continue
        reached.add(version)
        for hop in offers.get(version, []):
            wire = hop.encoding.wire
            longer = Path(path.start, (*path.hops, hop), path.wire + wire)
            longer_price = price + wire + HOP_BYTES
            heapq.heappush(queue, (longer_price, next(ties), longer, hop.version))
    raise AssertionError("every manifest has an anchor")


def servable(manifest: Manifest, held: Container[PolicyVersion]) -> list[Encoding]:
    """What a node that holds the versions ``held`` whole can serve of ``manifest``.

    An anchor needs the version alone. A delta can be made again from both of its ends: it is
    the same bytes with the same zstd, and proven by what it decodes to with another.
    """
    if manifest.version not in held:
        return []
    return [
        encoding
        for encoding in (manifest.anchor, *manifest.patches)
        if encoding.is_anchor or encoding.base in held
    ]
