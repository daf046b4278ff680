"""Failures with one peer, and what a person can check."""

from __future__ import annotations

import trio

from p2p.errors import BadMessage, PeerUnreachable, ProtocolNotSupported, WrongPeer


def likely_cause(error: Exception) -> str:
    """Return advice for a person after an error of `p2p.host.PEER_TROUBLE`."""
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
