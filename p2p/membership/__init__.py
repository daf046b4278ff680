"""Membership: which peers are in the swarm, what they hold, and whether they are alive.

The files, in the order in which to read them
---------------------------------------------
Formats, pure functions of bytes: `heartbeat` (the signed statement of one peer), `messages`
(the ten messages of the protocol), `config`.

Decisions, pure by contract: the folder `core`, whose `__init__` is a map of its own. It is one
state machine, `MembershipCore.handle(event, now) -> effects`: SWIM's failure detection over
HyParView's neighbours.

Driver, ordinary trio code: `service` (feeds the core and carries out its effects).

How a heartbeat flows
---------------------
::

    sender:    deadline -> Tick -> core -> Send(Beat) -> host.send
    receiver:  host -> Received -> core: verifier -> member_list -> Changed -> listeners
               a digest names a peer that is new -> pull -> Send(Want) -> ... -> Heartbeats

What a newcomer calls
---------------------
`open_membership` for a scope, and on the `Membership` that it gives:

- to enter: `join`;
- to look: `members`, `find`, `neighbours`, `size`, ``peer in membership``;
- to be told: `on_change`;
- to say something of this node: ``me.update``; and to certain peers each time: `interest`.

All other names are for operators (`counters`, `clock_off`), the host and tests.
"""

from p2p.membership.config import MembershipConfig
from p2p.membership.core.events import Change, Member, MemberEvent
from p2p.membership.heartbeat import PROTOCOL_ID, Profile
from p2p.membership.service import Membership, open_membership
from p2p.policy import NO_POLICY

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
