"""SHARDCAST: one origin's policies to every node of a run, over the uplinks of all of them.

The files, in the order in which to read them
---------------------------------------------
Formats, pure functions of bytes: `manifest` (what a version is, signed), `index` (its files and
spans, content-addressed), `layout` (where files are cut in spans), `codec` (spans as chunks),
`delta` (what changed between two versions), `patch` (the deltas of a whole policy, as a file),
`adapter` (low-rank sums to the version that a run began with),
`chunkset` (some chunks of a version, or those of some files),
`forest` (which peer forwards what to which), `messages`, `config`.

Decisions, pure by contract: the folder `core`, whose `__init__` is a map of its own. It is one
state machine, `ShardcastCore.handle(event, now) -> effects`.

Drivers, ordinary trio code: `service` (feeds the core and carries out its effects), `bulk`
(chunks on streams, in and out, within an owner's rates), `store` (all policies on
disk: written, read, checked, pruned; and whether the disk takes data), `publisher` (a
publisher's files become a version). The folder `http` offers versions to curl, browsers and the
PyPI package shardcast; its `__init__` is its map.

How a chunk flows
-----------------
::

    origin:   publisher -> store -> Publish -> core -> Push -> sender ==> bulk stream
    relay:    bulk stream ==> receiver -> ChunkCame -> core -> Push -> sender ==> its children
                                                            -> Keep -> store
    all here: core -> Finish -> store (fsync, rename) -> Stored -> core; wait_policy returns

What a newcomer calls
---------------------
`open_shardcast` for a scope, and on the `Shardcast` that it gives:

- to publish: `publish`;
- to fetch: `wait_policy`, then `pin` or `weights`; `check_weights` before an engine loads them;
- to look: `newest`, `held`, `fetching`, `manifest`, `stats`, `halted`;
- to connect it: `receive_announcement`, for what gossip brings.

All other methods are for the host, the disk and tests.
"""

from p2p.shardcast.config import ShardcastConfig, ShardcastStats
from p2p.shardcast.forest import RosterEntry
from p2p.shardcast.manifest import NO_POLICY, Manifest, PolicyVersion
from p2p.shardcast.service import Shardcast, open_shardcast

__all__ = [
    "NO_POLICY",
    "Manifest",
    "PolicyVersion",
    "RosterEntry",
    "Shardcast",
    "ShardcastConfig",
    "ShardcastStats",
    "open_shardcast",
]
