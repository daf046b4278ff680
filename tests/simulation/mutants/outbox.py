"""Bugs in hosts: what waits for a peer, and who is connected."""

from __future__ import annotations

import math

from p2p.host import PeerState
from p2p.identity import PeerId
from p2p.swarm.connector import Connector, _Dial
from p2p.swarm.core.gater import ConnectionGater
from p2p.swarm.core.limits import HeldConnection
from p2p.swarm.outbox import Lane, Outbox
from p2p.transport.connection import Connection


def overtake(lane: Lane, framed: bytes) -> bool:
    return lane._stream is not None and lane._stream.try_send(framed)


def count_for_ever(outbox: Outbox, lane: Lane) -> None:
    waiting = outbox._bytes.get(lane.peer, 0)
    _close(outbox, lane)
    outbox._bytes[lane.peer] = waiting


async def lose_with_the_first(
    connector: Connector, connection: Connection, held: HeldConnection
) -> None:
    await _carry(connector, connection, held)
    if connection.peer in connector.connected:
        connector.tell(connection.peer, PeerState.DISCONNECTED)


def never_again(gater: ConnectionGater, peer: PeerId, now: float, longer: float) -> None:
    gater._unreachable[peer] = math.inf


async def remember_the_failure(connector: Connector, peer: PeerId, dial: _Dial) -> None:
    await _dial(connector, peer, dial)
    if dial.error is not None:
        connector._dials[peer] = dial


_close = Outbox.close
_carry = Connector._carry
_dial = Connector._dial

BUGS = {
    "small messages overtake those that wait": (23, Lane, "try_send", overtake),
    "what a lost lane held stays counted": (1, Outbox, "close", count_for_ever),
    "a peer is gone with one of its connections": (2, Connector, "_carry", lose_with_the_first),
    "who did not answer is never sent to again": (
        4,
        ConnectionGater,
        "dial_failed",
        never_again,
    ),
    "a dial that failed is not forgotten": (1, Connector, "_dial", remember_the_failure),
}
