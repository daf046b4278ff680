"""Bugs in gossip."""

from __future__ import annotations

from p2p.events import PeerUp
from p2p.gossip.core.caches import SeenCache
from p2p.gossip.core.core import GossipCore
from p2p.gossip.core.events import Effect, Event


def see_nothing(seen: SeenCache, identity: bytes) -> bool:
    return False


def trust_everybody(core: GossipCore, *args: object, **keywords: object) -> None:
    _init(core, *args, **{**keywords, "verify": lambda *_: True})


def start_from_zero(core: GossipCore, *args: object, **keywords: object) -> None:
    _init(core, *args, **{**keywords, "seqno": 0})


def greet_nobody(core: GossipCore, event: Event, now: float) -> list[Effect]:
    if isinstance(event, PeerUp):
        _handle(core, event, now)
        return []
    return _handle(core, event, now)


_init = GossipCore.__init__
_handle = GossipCore.handle

BUGS = {
    "messages are not deduplicated": (1, SeenCache, "__contains__", see_nothing),
    "signatures are not checked": (1, GossipCore, "__init__", trust_everybody),
    "message numbers start again": (2, GossipCore, "__init__", start_from_zero),
    "newcomers do not hear what we hear": (1, GossipCore, "handle", greet_nobody),
}
