"""A ticket of a push, with other fields if a test wants them."""

from __future__ import annotations

from p2p.cast.ticket import Ticket
from p2p.identity import KeyPair
from p2p.multiaddr import Multiaddr
from p2p.policy import PolicyVersion

PUSHER = KeyPair(b"\1" * 32).peer_id


def ticket(**changes: object) -> Ticket:
    fields = {
        "pusher": PUSHER,
        "addrs": (Multiaddr.tcp("192.0.2.7", 4001), Multiaddr.tcp("2001:db8::7", 4001)),
        "secret": b"s" * 16, "name": "Qwen3-8B", "is_folder": True, "version": PolicyVersion(3),
        "manifest": b"m" * 32, **changes,
    }  # fmt: skip
    return Ticket(**fields)  # type: ignore[arg-type]
