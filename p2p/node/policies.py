"""Announcement of a run's policies, and their rosters.

It is what SHARDCAST takes from gossip and membership, in a node as in `p2p.cast`, which has no
run document and no DHT.
"""

from __future__ import annotations

import logging

from p2p.errors import BadMessage
from p2p.gossip import Validity
from p2p.identity import PeerId
from p2p.membership import Membership
from p2p.shardcast import RosterEntry, Shardcast

logger = logging.getLogger(__name__)


def policy_topic(run_id: bytes) -> str:
    """The gossip topic on which a run's policies are announced."""
    return f"/shoal/run/{run_id.hex()}/policy"


def roster(membership: Membership, run_id: bytes) -> list[RosterEntry]:
    """Return the peers that could relay policies: living members, with their capacity."""
    # Bytes per second that a peer counts for until its upload was measured: 8 Mbit/s, a slow
    # home.
    return [
        RosterEntry(member.peer, member.upload or 1_000_000)
        for member in membership.members()
        if member.run == run_id
    ]


def taken_when_judged(_: PeerId, __: bytes) -> None:
    """Do nothing with a gossip message: whoever judged it has taken it."""


def judge_announcement(shardcast: Shardcast, author: PeerId, data: bytes) -> Validity:
    """Return True if gossip should forward a policy announcement: it is valid and new.

    What can be valid for no node is rejected: malformed, of another run, falsely signed,
    evidence that proves nothing. All honest nodes agree on these. What this node cannot use is
    ignored: an old version, or a trainer that our run document does not name. A later document
    may name it, and the nodes that have that document forward its policies for good news; with
    a rejection they would be penalised by all nodes that have not heard of the document yet.
    """
    try:
        return (
            Validity.ACCEPT if shardcast.receive_announcement(author, data) else Validity.IGNORE
        )
    except BadMessage as error:
        logger.info("announcement_refused author=%r reason=%s", author, error)
        return Validity.REJECT
