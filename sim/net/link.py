"""Access links: the delays of bytes on a node's line.

Per piece of 64 KiB and direction one FIFO: a piece leaves when the pieces before it have left,
travels, and queues again at the receiver's line (store and forward). 3 % of every bulk piece is
charged to the reverse direction for acks. A stream may have three to five pieces under way
(`sim.net.stream.WINDOW_PIECES`). On six real shaped trees the time to the last node was met
within 6.0 % under cubic and 5.3 % under bbr, 2.3 % and 1.6 % in the mean
(bench/links.md), at a fraction of the cost of exact max-min sharing
(`sim.studies.lab.link_model.maxmin`, the oracle of the tests). Larger pieces are cheaper and
worse: 256 KiB with two under way add 15 % to a chain of five. What many parallel flows do to
one narrow, full uplink is not in the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Final

SEGMENT: Final = 64 * 1024
"""Bytes of a piece on a link. A piece on a line of 20 Mbit/s takes 27 ms, and each hop of a
relay costs that much once, since it passes on whole pieces. Larger pieces make fewer events and
a worse model: 256 KiB with two under way add 15 % to a chain of five."""
PAYLOAD_SHARE: Final = 1448 / 1514
"""Payload in a full Ethernet frame over TCP with timestamps."""
ACK_SHARE: Final = 0.03
"""Acks on the reverse line, as a share of the bulk: 66 bytes for every two frames of 1,514 are
2.2 %, and real links took slightly more. Acks do not queue here (bench/links.md)."""
ACKED_FROM: Final = 1448
"""Bytes from which a transfer is charged for acks; below, they ride on other packets."""
NATS: Final = ("cone", "address", "port", "symmetric")
"""Kinds of routers. None lets an unasked dialer in. Once the machine has dialled somebody from
the port at which it listens, ``cone`` lets everybody come to that port, ``address`` whoever is
at that address, and ``port`` what comes from that address and port. ``symmetric`` maps each
connection to another port, so that nobody can be told where to dial."""
MBIT: Final = 1_000_000
"""Bits of a megabit: providers count in powers of ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """Line of one machine, as a provider sells it."""

    up: float = 100.0
    """Mbit/s of the line, headers included. A line that is no scenario's subject: fast enough
    not to matter."""

    down: float = 100.0
    """Mbit/s of the line, headers included; as ``up``."""

    jitter: float = 0.0
    """Seconds: each transfer is late by up to this much."""

    loss: float = 0.0
    """Probability that a transfer needs one retransmission timeout. TCP turns loss into
    delay."""

    nat: str = ""
    """Kind of the router in front of the machine, one of `NATS`; empty if there is none."""

    def __post_init__(self) -> None:
        if not (self.up > 0 and self.down > 0):
            raise ValueError("a link needs some upload and some download")
        if not 0 <= self.loss < 1 or self.jitter < 0:
            raise ValueError("loss is a probability below 1, jitter a number of seconds")
        if self.nat not in ("", *NATS):
            raise ValueError(f"a router is one of {', '.join(NATS)}, not {self.nat!r}")


def cost_per_byte(mbit: float) -> float:
    """Return the nanoseconds that one payload byte occupies a line of ``mbit`` Mbit/s."""
    return 8e9 / (mbit * MBIT * PAYLOAD_SHARE) if mbit != math.inf else 0.0


def behind_nat(link: LinkSpec, kind: str = "port") -> LinkSpec:
    """Return the same line behind a router that lets no unasked dialer in."""
    return replace(link, nat=kind)


def drawn_link(rng: Random, up: tuple[float, float], down_factor: float) -> LinkSpec:
    """Return a random line: log-uniform upload, download up to ``down_factor`` as wide."""
    uplink = math.exp(rng.uniform(math.log(up[0]), math.log(up[1])))
    return LinkSpec(up=uplink, down=uplink * math.exp(rng.uniform(0, math.log(down_factor))))
