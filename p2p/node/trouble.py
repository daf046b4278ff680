"""Failures with one peer, and what a person can check."""

from __future__ import annotations

from typing import Final

import trio

from p2p.errors import (
    BadMessage,
    LimitExceeded,
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    WrongPeer,
)

PEER_TROUBLE: Final = (
    PeerUnreachable,
    ProtocolNotSupported,
    RemoteProtocolError,
    LimitExceeded,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.TooSlowError,
)
"""Exceptions that a request to one peer may raise although this node works correctly."""


def likely_cause(error: Exception) -> str:
    """Return advice for a person after an error of `PEER_TROUBLE`."""
    match error:
        case WrongPeer():
            return "another node answers there: is the id in the address out of date?"
        case PeerUnreachable():
            return (
                "nothing answers there: does that node run, is the address right, is there a"
                " firewall?"
            )
        case trio.TooSlowError():
            return "no answer in time: is there a firewall, or is that node very busy?"
        case ProtocolNotSupported():
            return "what answers there is no node of Shoal"
        case BadMessage():
            return f"what it sent cannot be used: {error}"
    return str(error) or type(error).__name__
