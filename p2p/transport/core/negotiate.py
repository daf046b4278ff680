"""multistream-select 1.0 without I/O: which protocol this stream speaks.

Theory of operation
-------------------
Every message is a line behind a varint length. Both sides say ``/multistream/1.0.0``; the
dialer then proposes protocols one by one, the listener echoes the first it serves and answers
``na`` to others.

The proposer sends its header with its first proposal, and with one protocol to propose the
caller may send data right behind them (0-RTT) and read the answer whenever it comes. The
chooser sends its header at once: py-libp2p waits for it before it proposes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from p2p.errors import BadMessage, LocalProtocolError, ProtocolNotSupported, RemoteProtocolError
from p2p.identity import ProtocolId
from p2p.wire import decode_varint_untrusted, encode_varint

HEADER: Final = "/multistream/1.0.0"
NOT_AVAILABLE: Final = "na"
MAX_LINE: Final = 256
"""Most bytes of a line. The longest protocol name in use, a mesh topic's, has about 60."""
MAX_PROPOSALS: Final = 32
"""Most proposals that a peer may make for one stream. go-libp2p's largest set has about a
dozen."""


def line(text: str) -> bytes:
    """Encode a line of multistream-select."""
    data = text.encode() + b"\n"
    return encode_varint(len(data)) + data


_GREETING: Final = line(HEADER)


class _Lines:
    """Splits bytes into lines and keeps what follows the negotiation."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeted = False

    def next_untrusted(self) -> str | None:
        """Return the next line behind the header, or None if it is incomplete. Raise
        `BadMessage`, and nothing else."""
        while True:
            head = decode_varint_untrusted(self._buffer)
            if head is None:
                return None
            length, start = head
            if not 0 < length <= MAX_LINE:
                raise BadMessage(f"a negotiation line has 1 to {MAX_LINE} bytes, not {length}")
            if len(self._buffer) < start + length:
                return None
            data = bytes(self._buffer[start : start + length])
            del self._buffer[: start + length]
            if not data.endswith(b"\n"):
                raise BadMessage("a negotiation line does not end in a newline")
            try:
                text = data[:-1].decode()
            except UnicodeDecodeError:
                raise BadMessage("a negotiation line is not UTF-8") from None
            if self._greeted:
                return text
            if text != HEADER:
                raise BadMessage(f"expected {HEADER}, got {text[:40]!r}")
            self._greeted = True

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data
        if not self._greeted and self._buffer.startswith(_GREETING):
            del self._buffer[: len(_GREETING)]
            self._greeted = True

    def clear(self) -> None:
        self._buffer = bytearray()

    @property
    def rest(self) -> bytes:
        return bytes(self._buffer)


class Proposer:
    """The dialer's side of a negotiation."""

    def __init__(self, protocols: Sequence[ProtocolId]) -> None:
        if not protocols:
            raise LocalProtocolError("there must be a protocol to propose")
        self._protocols = tuple(protocols)
        self._next = 0
        self._lines = _Lines()
        self._out = bytearray(_GREETING)
        self.chosen: ProtocolId | None = None
        self.is_deaf = False
        """True if further data is ignored. On this side it is always False."""
        self._propose()

    def _propose(self) -> None:
        self._out += line(self._protocols[self._next])
        self._next += 1

    @property
    def leftover(self) -> bytes:
        """Bytes behind the negotiation, which belong to the protocol. They are valid once
        `chosen` is set."""
        return self._lines.rest

    def data_to_send(self) -> bytes:
        """Return, and forget, the bytes to send to the peer now."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Advance by received bytes.

        Raises:
            RemoteProtocolError: The peer broke the negotiation's rules.
            ProtocolNotSupported: The peer refused all proposals.
        """
        self._lines.feed(data)
        while self.chosen is None:
            text = self._lines.next_untrusted()
            if text is None:
                return
            proposed = self._protocols[self._next - 1]
            if text == proposed:
                self.chosen = proposed
            elif text != NOT_AVAILABLE:
                raise RemoteProtocolError(f"proposed {proposed}, the answer was {text[:40]!r}")
            elif self._next < len(self._protocols):
                self._propose()
            else:
                raise ProtocolNotSupported(
                    f"the peer does not speak {' or '.join(self._protocols)}"
                )


class Chooser:
    """The listener's side of a negotiation."""

    def __init__(self, serves: Callable[[ProtocolId], bool]) -> None:
        self._serves = serves
        self._lines = _Lines()
        self._out = bytearray(_GREETING)
        self.proposals = 0
        """Number of protocols that the peer has proposed."""
        self.chosen: ProtocolId | None = None
        self.is_deaf = False
        """True if further data is ignored, because it belongs to a protocol that was
        refused."""

    @property
    def leftover(self) -> bytes:
        """Bytes behind the negotiation, which belong to the protocol. They are valid once
        `chosen` is set."""
        return self._lines.rest

    def data_to_send(self) -> bytes:
        """Return the bytes to send now; at first the header."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Advance by received bytes. Raise `RemoteProtocolError` if they break the rules, or if
        the peer proposes without end.

        Bytes that make no sense behind a refused proposal are that protocol's data, sent
        optimistically (0-RTT). They are dropped, and the dialer gives up when it reads our
        answer.
        """
        if self.is_deaf:
            return
        self._lines.feed(data)
        while self.chosen is None:
            try:
                text = self._lines.next_untrusted()
            except BadMessage:
                if not self.proposals:
                    raise
                self.is_deaf = True
                self._lines.clear()
                return
            if text is None:
                return
            self.proposals += 1
            if self.proposals > MAX_PROPOSALS:
                raise RemoteProtocolError(
                    f"more than {MAX_PROPOSALS} protocols proposed for one stream"
                )
            protocol = ProtocolId(text)
            if self._serves(protocol):
                self.chosen = protocol
                self._out += line(text)
            else:
                self._out += line(NOT_AVAILABLE)
