"""Settings of SHARDCAST (`[shardcast]` in a node's file) and its counters."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.wire import KI, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardcastConfig:
    """Patience, storage and rosters of one node."""

    folder: str = "policies"
    """Folder of policies, below the node's data folder."""

    keep_versions: int = 3
    """Newest whole policies kept on disk; pinned ones are kept besides."""

    keep_bytes: int = 64 * 1024 * MIB
    """Bytes of policies on disk, with the patches that lead to them, beyond which the oldest
    unpinned go first. The newest always stays."""

    upload_rate: float = 0.0
    """Bytes of chunks per second to all peers together; 0: as the line carries. A node's owner
    says so in ``[share]``."""

    download_rate: float = 0.0
    """The same of what comes."""

    cache_bytes: int = 64 * MIB
    """Bytes of verified chunks kept in memory, to be forwarded without reading them again: 16
    of the largest, of which each child has four waiting at most."""

    chunk_bytes: int = 0
    """Raw bytes per chunk of what we publish; 0 chooses by the size of the policy."""

    stall: float = 0.5
    """Least seconds after which a chunk that others hold is pulled instead of awaited. A
    shorter wait pulls what a short queue is about to bring."""

    roster_interval: float = 3.0
    """Least seconds between two rosters of one origin, unless the last was empty or a root must
    be replaced. A peer that joins during a hand-out waits as long until chunks are pushed to
    it."""

    def __post_init__(self) -> None:
        if self.keep_versions < 1:
            raise ValueError("keep_versions must be at least 1: the newest policy")
        if self.upload_rate < 0 or self.download_rate < 0:
            raise ValueError("a rate is a number of bytes per second, or 0 for no limit")
        if self.chunk_bytes and not 4 * KI <= self.chunk_bytes <= 4 * MIB:
            raise ValueError(f"chunk_bytes is 4 KiB to 4 MiB, or 0, not {self.chunk_bytes}")
        if self.stall <= 0 or self.roster_interval < 0:
            raise ValueError("stall must be positive and roster_interval not negative")


@dataclass(slots=True)
class ShardcastStats:
    """Counts of one node since it started; bytes are wire bytes of chunks."""

    uploaded_as_origin: int = 0
    """Bytes of this node's own policies that it sent."""
    uploaded_as_relay: int = 0
    from_origin: int = 0
    from_peers: int = 0
    duplicates: int = 0
    """Bytes of chunks that this node already had when they came."""
    chunks_bad: int = 0
    chunks_repaired: int = 0
    """Chunks that came because they were asked for, not because the forest brought them."""
    versions_completed: int = 0
    versions_skipped: int = 0
    """Versions given up for a newer one."""
    disk_refuses: bool = False
    """True if the disk takes nothing now: policies are served, and fetched when it does
    again."""
    disk_failures: int = 0
    versions_too_large: int = 0
    """Versions given up because this disk is too small for them."""
