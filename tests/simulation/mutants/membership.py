"""Bugs in who is alive."""

from __future__ import annotations

from p2p.identity import PeerId
from p2p.membership.core.active_view import ActiveView
from p2p.membership.core.failure_detector import FailureDetector
from p2p.membership.core.local_heartbeat import LocalHeartbeat
from p2p.membership.core.member_list import MemberList, MemberState


def death_is_unknown(members: MemberList, peer: PeerId) -> int:
    return -1


def probe_for_ever(detector: FailureDetector, member: MemberState, now: float) -> None:
    member.seen = now
    detector.probe(member)


def mend_nothing(active_view: ActiveView, now: float) -> None:
    """The other side of a partition stays there."""


def start_from_one(local: LocalHeartbeat, *args: object) -> None:
    _init(local, *args[:-1], 1)


_init = LocalHeartbeat.__init__

BUGS = {
    "stale heartbeats are accepted": (14, MemberList, "seqno_of_dead", death_is_unknown),
    "no member is ever declared dead": (1, FailureDetector, "_on_silence", probe_for_ever),
    "partitions are not mended": (19, ActiveView, "_heal", mend_nothing),
    "sequence numbers start again": (2, LocalHeartbeat, "__init__", start_from_one),
}
