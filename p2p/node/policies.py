"""Announcement of a run's policies, and their rosters.

It is what SHARDCAST takes from gossip and membership, in a node as in `p2p.cast`, which has no
run document and no DHT.
"""

from __future__ import annotations

from p2p.gossip import Validity
from p2p.identity import PeerId
from p2p.membership import Membership
from p2p.shardcast import RosterEntry, Shardcast


def policy_topic(run_id: bytes) -> str:
    """Return the gossip topic for announcements of a run's policies."""
    return f"/shoal/run/{run_id.hex()}/policy"


def roster(membership: Membership, run_id: bytes) -> list[RosterEntry]:
    """Return the living members that could relay policies, with their capacity."""
    # Bytes per second that a peer counts for until its upload was measured: 8 Mbit/s, a slow
    # home.
    return [
        RosterEntry(
            member.peer,
            member.upload or 1_000_000,
            any(addr.relay is not None for addr in member.addrs),
        )
        for member in membership.members()
        if member.run == run_id
    ]


def judge_announcement(shardcast: Shardcast, author: PeerId, data: bytes) -> Validity:
    """Return whether gossip should accept or ignore a policy announcement.

    An announcement that no node can accept is rejected (`BadMessage`): a malformed one, one of
    another run, one with a false signature, or evidence that proves nothing. All honest nodes
    agree on these. An announcement that only this node cannot use is ignored: that of an old
    version, or of a trainer that our run document does not name. A later document may name that
    trainer, and nodes with that document rightly forward its policies. Rejection would penalise
    them at all nodes without it.
    """
    return Validity.ACCEPT if shardcast.receive_announcement(author, data) else Validity.IGNORE
