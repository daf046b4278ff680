"""Heartbeats that hostile members sign.

They are well-formed: the lie is in what is done with them.

Used by the hostile scenarios and by the attacks on a live node (tests/attacks).
"""

from __future__ import annotations

from typing import Any, Final

from p2p.identity import Signer
from p2p.membership.heartbeat import Heartbeat, Profile, SignedHeartbeat, sign_heartbeat
from p2p.multiaddr import Multiaddr

EXPIRES_AFTER: Final = 600.0
"""Seconds of wall time for which a hostile heartbeat is good on paper; what honest nodes say is
1,800."""


def say_alive(
    signer: Signer,
    seqno: int,
    wall: float,
    *,
    interval: float = 5.0,
    addrs: tuple[Multiaddr, ...] = (),
    run: bytes = b"",
    stamp: bytes = b"",
) -> SignedHeartbeat:
    """Return a heartbeat with any number, interval and addresses.

    Every heartbeat of every attack is made here: what honest nodes must bring along (a work
    stamp), hostile ones bring along as well, since they have paid for it.
    """
    paid: dict[str, Any] = (
        {"stamp": stamp} if stamp and "stamp" in Profile.__dataclass_fields__ else {}
    )
    heartbeat = Heartbeat(
        peer=signer.peer_id,
        seqno=seqno,
        expires=round(wall + EXPIRES_AFTER),
        interval=interval,
        profile=Profile(addrs=addrs, run=run, **paid),
    )
    return sign_heartbeat(heartbeat, signer)
