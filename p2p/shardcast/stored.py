"""A policy of the store: its paths on disk, and its verified spans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from p2p.concurrency import Notifier
from p2p.identity import Verify
from p2p.shardcast.chunkset import EMPTY
from p2p.shardcast.index import Index
from p2p.shardcast.manifest import Manifest, PolicyVersion, decode_manifest_untrusted
from p2p.wire import fields_untrusted, pack, unpack_untrusted

HEAD: Final = ".policy"
"""Suffix of the file with a policy's manifest and index, and with its files' path if this node
published it."""
PART: Final = ".part"
"""Suffix of a policy's file or folder while spans are missing."""
WHOLE: Final = (".safetensors", ".files")
"""Suffixes of a complete policy: of one file, and of a folder."""
PATCH_FILE: Final = ".patch"
"""Suffix of the file of a complete patch."""

Bytes = bytes | memoryview


class StoredPolicy:
    """A policy on this disk, complete or not."""

    def __init__(self, manifest: Manifest, index: Index, folder: str, source: str = "") -> None:
        """Describe a policy. ``source`` is the path from which this node published it, if it
        did."""
        self.manifest = manifest
        self.index = index
        self.source = source
        self.encoding = manifest.encoding_of(index)
        """The stored encoding; the anchor stands for the policy itself."""
        self.stem = f"{folder}/v{manifest.version:016d}-{self.name.hex()[:8]}"
        self.verified = EMPTY
        """Spans that were verified, in memory or on disk."""
        self.stored = False
        """True if the policy is complete, durable and under its final name."""
        self.has_head = False
        """True if the head is on the disk."""
        self.has_room = False
        """True if the files are on the disk, with room for every span."""
        self.unwritten: dict[int, Bytes] = {}
        """Maps each verified span that is not yet written to its bytes."""
        self._busy: dict[int, None] = {}
        """Spans that are being written."""
        self._idle = Notifier()
        self.pins = 0

    def __repr__(self) -> str:
        return f"StoredPolicy(v{self.version}, {len(self.verified)} of {len(self.index)})"

    @property
    def version(self) -> PolicyVersion:
        """The version of the policy."""
        return self.manifest.version

    @property
    def name(self) -> bytes:
        """The digest by which messages name it."""
        return self.manifest.name_of(self.encoding)

    @property
    def is_patch(self) -> bool:
        """True if it is a patch or an adapter, which turns another policy into this one."""
        return not self.encoding.is_anchor

    # Where it is

    @property
    def head(self) -> str:
        """The path of the head file."""
        return self.stem + HEAD

    @property
    def part(self) -> str:
        """The path of its file or folder while spans are missing."""
        return self.stem + PART

    @property
    def final(self) -> str:
        """The path of the policy's file or folder once it is complete."""
        if self.is_patch:
            return self.stem + PATCH_FILE
        return self.source or self.stem + WHOLE[self.index.is_folder]

    @property
    def weights(self) -> str:
        """The current path of the policy's file or folder."""
        return self.final if self.stored else self.part

    def file(self, number: int, *, is_final: bool = False) -> str:
        """Return the current or final path of one of the policy's files."""
        weights, path = self.final if is_final else self.weights, self.index.files[number].path
        return f"{weights}/{path}" if path else weights

    @property
    def files(self) -> list[str]:
        """Return the current path of each file."""
        return [self.file(number) for number in range(len(self.index.files))]

    @property
    def footprint(self) -> int:
        """Return the bytes that it occupies on disk."""
        return self.index.size + len(self.index.data)

    def encode_head(self) -> bytes:
        """Return the bytes of its head."""
        return pack([self.manifest.encode(), self.index.data, self.source])

    # What is here

    @property
    def is_whole(self) -> bool:
        """True if every span was verified."""
        return len(self.verified) == len(self.index)

    def add(self, span: int, raw: Bytes) -> None:
        """Add a verified span, which is to be written."""
        self.verified = self.verified.including(span)
        self.unwritten[span] = raw

    @contextmanager
    def writing(self) -> Iterator[dict[int, Bytes]]:
        """Yield the unwritten spans that no other task is writing. They count as written if the
        block ends without an exception."""
        mine = {s: raw for s, raw in sorted(self.unwritten.items()) if s not in self._busy}
        self._busy |= dict.fromkeys(mine)
        try:
            yield mine
            for span in mine:
                del self.unwritten[span]
        finally:
            for span in mine:
                del self._busy[span]
            if not self._busy:
                self._idle.notify_all()

    async def wait_idle(self) -> None:
        """Return when no task writes its spans."""
        while self._busy:
            await self._idle.wait()

    def disown(self) -> None:
        """Forget the files from which this node published it, because they are gone or changed.
        It is then fetched like any other policy."""
        self.source, self.stored, self.has_head, self.verified = "", False, False, EMPTY

    # Who needs it

    @contextmanager
    def pin(self) -> Iterator[None]:
        """Keep the policy on disk for the length of the block."""
        self.pins += 1
        try:
            yield
        finally:
            self.pins -= 1


def decode_head_untrusted(data: bytes, run: bytes, verify: Verify, folder: str) -> StoredPolicy:
    """Decode the policy that a head describes. Raise `BadMessage`, and nothing else: the head
    may be torn, or of an older Shoal."""
    fields = fields_untrusted(unpack_untrusted(data), bytes, bytes, str, what="policy's head")
    manifest = decode_manifest_untrusted(fields[0], run, verify)
    return StoredPolicy(manifest, manifest.index_untrusted(fields[1]), folder, fields[2])
