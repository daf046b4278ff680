"""Who is in the swarm, what they have and whether they live: signed heartbeats over a small
overlay."""

from p2p.membership.config import MembershipConfig
from p2p.membership.core.events import Change, Member, MemberEvent
from p2p.membership.heartbeat import NO_POLICY, PROTOCOL_ID, Profile
from p2p.membership.service import Membership, open_membership

__all__ = [
    "NO_POLICY",
    "PROTOCOL_ID",
    "Change",
    "Member",
    "MemberEvent",
    "Membership",
    "MembershipConfig",
    "Profile",
    "open_membership",
]
