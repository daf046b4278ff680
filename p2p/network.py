"""The only door for bytes (dial, listen): TCP, memory and the simulator stand behind it.

What comes out is a plain byte stream to an unproven peer; who it is, `p2p.transport` proves.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import trio

from p2p.multiaddr import Multiaddr


class Listener(Protocol):
    """Accepts byte streams at one address."""

    @property
    def addr(self) -> Multiaddr:
        """The actual address, in which port 0 is replaced by a real port."""

    async def accept(self) -> trio.abc.HalfCloseableStream:
        """Return the next incoming stream. Raises `trio.ClosedResourceError` once closed."""

    async def aclose(self) -> None:
        """Stop listening. Accepted streams stay open."""


class Network(Protocol):
    """A network of raw byte streams. Its suite is tests/conformance/test_networks.py."""

    async def dial(self, addr: Multiaddr) -> trio.abc.HalfCloseableStream:
        """Open a stream to ``addr`` (a ``/p2p/`` at its end is ignored). Raises
        `PeerUnreachable`.
        """

    async def listen(self, addr: Multiaddr) -> Listener:
        """Listen at ``addr``. Raises `ConfigError` if the address cannot be had."""


@runtime_checkable
class PunchingNetwork(Protocol):
    """A network that can dial from the port at which it listens."""

    async def punch(self, addr: Multiaddr) -> trio.abc.HalfCloseableStream:
        """Dial ``addr`` from our listener's port, and again while it refuses. The caller sets
        the deadline. Raises `PeerUnreachable`."""
