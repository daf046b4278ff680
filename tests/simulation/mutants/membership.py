"""Bugs in who is alive."""

from __future__ import annotations

from p2p.identity import PeerId
from p2p.membership.core.active_view import Overlay
from p2p.membership.core.failure_detector import Silence
from p2p.membership.core.local_heartbeat import Voice
from p2p.membership.core.member_list import View
from p2p.membership.core.member_state import Entry


def newest_of_nobody(view: View, peer: PeerId) -> int:
    return -1


def probe_for_ever(silence: Silence, entry: Entry, now: float) -> None:
    entry.seen = now
    silence.probe(entry)


def mend_nothing(overlay: Overlay, now: float) -> None:
    """The other side of a partition stays there."""


def start_from_one(voice: Voice, *args: object) -> None:
    _init(voice, *args[:-1], 1)


_init = Voice.__init__

BUGS = {
    "stale heartbeats are accepted": (1, View, "newest", newest_of_nobody),
    "nobody is ever declared dead": (1, Silence, "_judge_silence", probe_for_ever),
    "partitions are not mended": (17, Overlay, "_heal", mend_nothing),
    "sequence numbers start again": (2, Voice, "__init__", start_from_one),
}
