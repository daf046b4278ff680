"""Offences of peers, with their penalty points.

A host forgets half of a peer's points every minute, and refuses a peer that has 100 of them
(`p2p.swarm.core.gater`). So the points say how often a peer may do a thing: what only an enemy
does costs 67 or more, what a bug may cause now and then costs a few.
"""

from __future__ import annotations

from enum import Enum


class Offence(Enum):
    """A kind of misbehaviour, with its points and a description."""

    LIE = (100.0, "served content that its digest refutes")
    """A peer that serves a chunk has checked its digest, or made the chunk up."""

    VIOLATION = (67.0, "broke a protocol: a bad record, frame or negotiation")
    """The connection is closed. A second violation within a minute leads to refusal."""

    FORGED = (25.0, "passed on a signature that is false")
    """An honest peer checks a signature before it passes a message on. Four offences lead to
    refusal."""

    MALFORMED = (25.0, "sent a message that cannot be decoded")
    """The message is malformed, but its frame is whole, so the connection stays. No honest
    program writes one."""

    FLOOD = (25.0, "sent so much over its quota that no pause explains it")
    """A process that was stopped for a while sends its messages all at once, and stays below
    this quota."""

    REJECTED = (10.0, "passed on what a topic's validator rejects")
    """A bug in a validator may dupe its peer: ten of them, not four, disconnect."""

    NONSENSE = (10.0, "answered a question with nonsense")
    """The peer sent nonsense, perhaps because it runs another version of the program."""

    ASKED = (5.0, "asked for a seat more often than its quota")
    """A peer that asks every second is cut off within half a minute."""

    GRAFT = (2.0, "asked for a place in a mesh that it was told to wait for")
    """The peer may have been too early because two clocks differ."""

    BROKEN_PROMISE = (2.0, "advertised messages and did not send them")
    """The peer broke a promise, perhaps by bad luck. One a second disconnects after 74."""

    REPLAYED = (1.0, "sent an older record of its own")
    """The peer repeated an old record. Its disk may have lost its sequence numbers."""

    OBSOLETE = (1.0, "suspected somebody on news that is long out of date")
    """The suspicion is obsolete. The peer may have been cut off from the swarm."""

    OVER_QUOTA = (1.0, "sent a message over its quota")
    """The message is dropped. A hundred within a minute mean a broken peer."""

    def __init__(self, points: float, meaning: str) -> None:
        self.points = points
        self.meaning = meaning
