"""Signed statements of publishers: manifests, rosters, and proofs of equivocation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from p2p.bounded import BoundedDict
from p2p.equivocation import Equivocation, conflict
from p2p.errors import ShoalError
from p2p.identity import PeerId, Verify
from p2p.shardcast.forest import Roster, decode_roster_untrusted
from p2p.shardcast.index import digest_of
from p2p.shardcast.manifest import Manifest, decode_manifest_untrusted
from p2p.shardcast.messages import Evidence

MAX_MANIFESTS: Final = 64
"""Manifests remembered of a publisher, newest versions first: two minutes of the fastest run,
hours of a usual one. A longer memory would find older contradictions; the peers that were there
have found those."""
MAX_ROSTERS: Final = 8
"""Rosters per origin: chunks travel by the roster under which they left, versions overlap, and
while peers come an origin signs one every three seconds: those of the last half minute."""


class _Stranger(ShoalError):
    """Raised inside a decoder if the author is not a known publisher of this run. Its signature
    is not verified."""


class Statements:
    """Holds the signed statements of publishers. Each statement is judged once."""

    def __init__(
        self, run: bytes, may_publish: Callable[[PeerId], bool], verify: Verify
    ) -> None:
        self._run = run
        self._may_publish = may_publish
        self._verify = verify
        self._judged: BoundedDict[bytes, Manifest] = BoundedDict(MAX_MANIFESTS)
        # Both tables have eight publishers: a run names a handful.
        self._by_version: BoundedDict[PeerId, BoundedDict[int, Manifest]] = BoundedDict(8)
        """Manifests of each publisher: one may contradict only itself."""
        self._seen: BoundedDict[bytes, None] = BoundedDict(MAX_MANIFESTS)
        self._rosters: BoundedDict[PeerId, dict[int, Roster]] = BoundedDict(8)
        self.halted: dict[PeerId, Equivocation[Manifest]] = {}
        """Maps each publisher that is convicted of equivocation to the proof."""

    def is_trusted(self, publisher: PeerId) -> bool:
        """Return True if ``publisher`` may publish and was never found to contradict itself."""
        return publisher not in self.halted and self._may_publish(publisher)

    def halt(self, evidence: Equivocation[Manifest]) -> None:
        """Record a proof of equivocation, and accept no further statement of its publisher."""
        self.halted[evidence.author] = evidence

    def _is_signed(self, author: PeerId, domain: str, content: bytes, signature: bytes) -> bool:
        """Verify a publisher's signature. Authors that are not trusted publishers cost no
        verification, since any peer can sign."""
        if not self.is_trusted(author):
            raise _Stranger
        return self._verify(author, domain, content, signature)

    def manifest_untrusted(self, data: bytes) -> Manifest | None:
        """Decode and judge a manifest, once. Return None if its author is not trusted.

        Raises:
            BadMessage: The bytes are not a well-signed manifest of this run.
        """
        name = digest_of(data)
        manifest = self._judged.get(name)
        if manifest is None:
            try:
                manifest = decode_manifest_untrusted(data, self._run, self._is_signed)
            except _Stranger:
                return None
            self._judged[name] = manifest
        return manifest if self.is_trusted(manifest.publisher) else None

    def record(self, manifest: Manifest) -> Equivocation[Manifest] | None:
        """Remember a trusted manifest. Return a proof if it contradicts an earlier one of its
        publisher."""
        known = self._by_version.get(manifest.publisher)
        if known is None:
            # One more than are remembered: until the lowest version goes, below.
            known = BoundedDict(MAX_MANIFESTS + 1)
            self._by_version[manifest.publisher] = known
        known[manifest.version] = known.get(manifest.version, manifest)
        bound = manifest.bound
        contradicted = next(
            (m for m in known.values() if conflict(m.bound, bound) is not None), None
        )
        if len(known) > MAX_MANIFESTS:
            del known[min(known)]
        return None if contradicted is None else Equivocation(contradicted, manifest)

    def manifests(self, publisher: PeerId) -> list[Manifest]:
        """Return the remembered manifests of one publisher."""
        return list(self._by_version.get(publisher, {}).values())

    def evidence_untrusted(self, message: Evidence) -> Equivocation[Manifest] | None:
        """Decode a proof of equivocation. Return None if its publisher is not trusted anyway.

        Raises:
            BadMessage: The message proves no equivocation.
        """
        first = self.manifest_untrusted(message.first)
        second = self.manifest_untrusted(message.second)
        return None if first is None or second is None else Equivocation(first, second)

    def roster_untrusted(self, data: bytes) -> Roster | None:
        """Decode and remember a roster. Return None if it is not trusted or not new.

        Raises:
            BadMessage: The bytes are not a well-signed roster of this run.
            OtherForestRule: The roster is for another version of Shoal, which is no fault of
            the peer.
        """
        name = digest_of(data)
        if name in self._seen:
            return None  # every bulk stream brings it once: it is judged the first time
        try:
            roster = decode_roster_untrusted(data, self._run, self._is_signed)
        except _Stranger:
            return None
        self._seen[name] = None
        return roster if self.add_roster(roster) else None

    def add_roster(self, roster: Roster) -> bool:
        """Remember a roster if its origin is trusted and it is newer than the known ones.
        Return True if it was remembered."""
        if not self.is_trusted(roster.origin):
            return False
        epochs = self._rosters.get(roster.origin, {})
        if epochs and roster.epoch <= max(epochs):
            return False
        self._rosters[roster.origin] = epochs
        epochs[roster.epoch] = roster
        if len(epochs) > MAX_ROSTERS:
            del epochs[min(epochs)]
        return True

    def roster(self, origin: PeerId, epoch: int | None = None) -> Roster | None:
        """Return the roster of ``origin`` with this epoch, or the newest; None if it is
        unknown."""
        epochs = self._rosters.get(origin)
        if not epochs:
            return None
        return epochs.get(max(epochs) if epoch is None else epoch)
