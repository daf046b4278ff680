"""Versions that this node fetches and holds, and versions that it skips.

A higher version is better, and one publisher leads a run: of two manifests of one version the
node keeps to the one that it heard of first. At most `MAX_FETCHES` policies are fetched at a
time: the newest, and of the others the one that will be whole first. A version is fetched as a
chain of patches from one that is here or under way, or as its anchor, whichever has fewer bytes
left; what its origin hands out is fetched by every member of the roster, who relays it even if
it needs another encoding itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from p2p.bounded import BoundedDict
from p2p.identity import PeerId
from p2p.shardcast.chunkset import ChunkSet, Selection
from p2p.shardcast.core.download import Download
from p2p.shardcast.core.statements import MAX_MANIFESTS, Statements
from p2p.shardcast.index import Index
from p2p.shardcast.manifest import NO_POLICY, Encoding, Manifest

MAX_FETCHES: Final = 2
"""Versions fetched at a time. With one, a node slower than the run publishes would give up
every version for the next and never have any; a third would share the line for nothing."""


class Versions:
    """The versions that this node holds, fetches or has finished with."""

    def __init__(
        self, local: PeerId, statements: Statements, stall: float, selection: Selection | None
    ) -> None:
        self.newest: Manifest | None = None
        """Manifest of the newest policy that is complete on this node."""
        self.downloads: dict[bytes, Download] = {}
        self.is_disk_full = False
        """True while the disk refuses data. Announced versions are postponed until
        `take_postponed`."""
        self._local = local
        self._statements = statements
        self._stall = stall
        self._selection = selection
        self._over: BoundedDict[bytes, None] = BoundedDict(MAX_MANIFESTS)
        self._asked_about: BoundedDict[bytes, float] = BoundedDict(MAX_MANIFESTS)
        """Maps each unknown version to the time at which a peer was last asked for its
        manifest."""
        self._postponed: dict[bytes, Manifest] = {}
        """The newest versions to fetch once the disk takes data again, by digest."""
        self._patching: dict[bytes, bytes] = {}
        """Maps each patch that the driver is applying to the policy that it leads to."""
        self._spent: BoundedDict[bytes, None] = BoundedDict(MAX_MANIFESTS)
        """Patches that have already been applied as far as possible."""

    # Questions

    def of(self, manifest: Manifest) -> list[Download]:
        """Return the held and fetched encodings of a version: itself, and patches to it."""
        return [d for d in self.downloads.values() if d.manifest.digest == manifest.digest]

    def is_old(self, manifest: Manifest) -> bool:
        """Return True if this version, or a newer one, is here."""
        return self.newest is not None and manifest.version <= self.newest.version

    def is_over(self, manifest: Manifest) -> bool:
        """Return True if this version is not worth fetching (any more), or waits for the
        disk."""
        return (
            self.is_old(manifest)
            or manifest.digest in self._over
            or manifest.digest in self._postponed
            or any(
                d.manifest.version == manifest.version and d.manifest.digest != manifest.digest
                for d in self.downloads.values()
            )
        )

    @property
    def best(self) -> Download | None:
        """The newest version that is held or being fetched."""
        downloads = self.downloads.values()
        return max(downloads, key=lambda d: d.manifest.version, default=None)

    def newest_known(self, manifest: Manifest) -> Manifest:
        """Return the newest version by the publisher of ``manifest`` that this node has heard
        of."""
        known = self._statements.manifests(manifest.publisher)
        return max([manifest, *known], key=lambda one: one.version)

    def is_dispensable(self, download: Download) -> bool:
        """Return True if the download can be given up: it is a patch, or a newer version is
        known."""
        newest = self.newest_known(download.manifest)
        return download.is_patch or download.manifest.version < newest.version

    def patches_since(self, version: int, newest: Manifest) -> list[Download]:
        """Return the patches that lead a peer from ``version`` to the newest, in case it has
        not heard of the versions between. A peer that holds none needs only the newest, and its
        base if that is an adapter."""
        adapter, held = newest.handed_out, self.downloads.values()
        theirs = [d for d in held if d.stored and d.manifest.publisher == newest.publisher]
        if adapter.is_adapter:
            anchors = [d for d in theirs if not d.is_patch]
            return [d for d in anchors if version < d.manifest.version == adapter.base]
        patches = [d for d in theirs if d.encoding == d.manifest.handed_out and d.is_patch]
        found = [
            d for d in patches if NO_POLICY < version < d.manifest.version < newest.version
        ]
        return sorted(found, key=lambda d: d.manifest.version)

    def may_pull(self, download: Download) -> bool:
        """Return True if chunks of this download may be pulled now. Of the patches, only the
        first two on the way are pulled: more would share the line, count as late, and be
        requested again."""
        waiting = [d for d in self.downloads.values() if d.is_patch and not d.is_whole]
        first = sorted(waiting, key=lambda d: d.manifest.version)[:MAX_FETCHES]
        return not download.is_patch or download in first

    # What is fetched

    def fetch(self, manifest: Manifest, now: float) -> tuple[list[Download], list[Download]]:
        """Start to fetch a version, if it is worth it and there is a disk to keep it. Returns
        the downloads that this begins, and those that are to be given up for it."""
        if self.is_over(manifest):
            return [], []
        if self.is_disk_full:
            self.postpone(manifest)
            return [], []
        handed_out = manifest.name_of(manifest.handed_out)
        roster = self._statements.roster(manifest.publisher)
        is_fed = roster is not None and self._local in roster.positions
        needed = self._needed_for(manifest)
        if is_fed:
            needed.setdefault(handed_out, (manifest, manifest.handed_out))
        begun = []
        for name, (version, encoding) in needed.items():
            if name not in self.downloads:
                download = Download(version, now, self._stall, encoding)
                download.pull_only = not is_fed or name != handed_out
                self.downloads[name] = download
                begun.append(download)
        fetched = [d for d in self.downloads.values() if not d.is_whole]
        ordered = sorted(
            (d for d in fetched if not d.is_patch), key=lambda d: d.manifest.version
        )
        given_up = []
        if len(ordered) > MAX_FETCHES:
            # The newest stays, and of the others the one that will be whole first: a node
            # slower than the run publishes would otherwise give up every version for the next,
            # and never have any.
            best = max(ordered[:-1], key=lambda d: d.share)
            given_up = [d for d in ordered[:-1] if d is not best]
        given_up += [d for d in fetched if d.is_patch and d.name not in needed]
        return [d for d in begun if d not in given_up], given_up

    def _needed_for(self, manifest: Manifest) -> dict[bytes, tuple[Manifest, Encoding]]:
        """Return the encodings to fetch for a version, by name: the patches since a version
        that is here or under way, or the anchor if that has fewer bytes.

        So a joiner that has most of an anchor when the next version comes out finishes it and
        takes a patch, instead of beginning again.
        """
        needed = {manifest.digest: (manifest, manifest.anchor)}
        if self._selection is not None:
            return needed
        held = {
            d.manifest.version: 0 if d.stored else d.left_bytes
            for d in self.downloads.values()
            if not d.is_patch and d.manifest.publisher == manifest.publisher
        }
        known = {one.version: one for one in self._statements.manifests(manifest.publisher)}
        fewest, wire = held.get(manifest.version, manifest.anchor.wire), 0
        chain: dict[bytes, tuple[Manifest, Encoding]] = {}
        step: Manifest | None = manifest
        while step is not None:
            patch = step.handed_out
            name = step.name_of(patch)
            if patch.is_anchor or name in self._over:
                break
            chain[name], wire = (step, patch), wire + patch.wire
            if patch.base in held and (
                patch.is_adapter or wire + held[patch.base] < fewest
            ):  # a base that is under way makes the next versions cheap as well
                needed, fewest = dict(chain), wire + held[patch.base]
            step = known.get(patch.base)
        return needed

    def hold(
        self, manifest: Manifest, index: Index, verified: ChunkSet, now: float, *, stored: bool
    ) -> Download:
        """Take a version that is on disk."""
        encoding = manifest.encoding_of(index)
        name = manifest.name_of(encoding)
        before = self.downloads.pop(name, None)
        download = self.downloads[name] = Download(manifest, now, self._stall, encoding)
        if before is not None:
            download.sharing = before.sharing
        download.resume(index, verified, stored=stored)
        self.restrict(download)
        return download

    def restrict(self, download: Download) -> None:
        """Limit a download to the chunks that this node selects."""
        if self._selection is not None and download.index is not None:
            download.wanted = self._selection.spans(download.index)

    def close(self, name: bytes) -> None:
        """Finish with a version, so that it is not fetched again."""
        self._over[name] = None

    def advance(self, manifest: Manifest) -> list[Download]:
        """Record that a version is complete. Return the older versions that are incomplete and
        no longer needed."""
        if not self.is_old(manifest):
            self.newest = manifest
        return [
            d for d in self.downloads.values() if not d.is_whole and self.is_old(d.manifest)
        ]

    # Versions of which only the name is known

    def hear_name(self, name: bytes, now: float) -> bool:
        """Return True if a peer that has chunks of an unknown version should be asked for the
        manifest, as another was not a moment ago."""
        if name in self._over or now < self._asked_about.get(name, -math.inf) + self._stall:
            return False
        self._asked_about.renew(name, now)
        return True

    # A disk that refuses

    def postpone(self, manifest: Manifest) -> None:
        """Remember a version, and forget older ones beyond `MAX_FETCHES`."""
        self._postponed[manifest.digest] = manifest
        if len(self._postponed) > MAX_FETCHES:
            del self._postponed[
                min(self._postponed, key=lambda name: self._postponed[name].version)
            ]

    def is_postponed(self, name: bytes) -> bool:
        """Return True if a version waits for the disk."""
        return name in self._postponed

    def take_postponed(self) -> Iterable[Manifest]:
        """Return the postponed versions, oldest first, since the disk takes data again."""
        postponed, self._postponed = self._postponed, {}
        self.is_disk_full = False
        return sorted(postponed.values(), key=lambda manifest: manifest.version)

    # Patches

    def next_patches(self) -> list[Download]:
        """Return the patches that the driver can apply now. Each is returned once."""
        ready = []
        for download in self.downloads.values():
            manifest = download.manifest
            if not (download.is_patch and download.stored) or download.name in self._spent:
                continue
            made = self.downloads.get(manifest.digest)
            is_here = made is not None and made.is_whole
            if is_here or manifest.digest in self._patching.values():
                continue
            if self._holds_base(download) and not self.is_old(manifest):
                self._patching[download.name] = manifest.digest
                ready.append(download)
        return ready

    def _holds_base(self, patch: Download) -> bool:
        return any(
            d.stored and not d.is_patch and d.manifest.version == patch.encoding.base
            for d in self.downloads.values()
            if d.manifest.publisher == patch.manifest.publisher
        )

    def end_patch(self, patch: bytes, *, made: bool) -> bytes | None:
        """Record that the driver has finished with a patch. Return the policy that it leads
        to."""
        if made:
            self._spent[patch] = None
        return self._patching.pop(patch, None)
