"""multistream-select 1.0 without I/O: which protocol this stream speaks.

Theory of operation
-------------------
Every message is a line behind a varint length. Both sides say ``/multistream/1.0.0``; the
dialer then proposes a protocol, the listener echoes it if it serves it and answers ``na`` if
not. A foreign dialer may propose another then; ours gives up.

The proposer sends its header with its proposal, and the caller may send data right behind them
(0-RTT) and read the answer whenever it comes. The chooser sends its header at once: py-libp2p
waits for it before it proposes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from p2p.errors import BadMessage, ProtocolNotSupported, RemoteProtocolError
from p2p.identity import ProtocolId
from p2p.wire import decode_varint_untrusted, encode_varint

HEADER: Final = "/multistream/1.0.0"
NOT_AVAILABLE: Final = "na"
MAX_LINE: Final = 256
"""Most bytes of a line. The longest protocol name in use, a mesh topic's, has about 60."""


def line(text: str) -> bytes:
    """Encode a line of multistream-select."""
    data = text.encode() + b"\n"
    return encode_varint(len(data)) + data


_GREETING: Final = line(HEADER)


class _Negotiation:
    """State that both sides share: lines in and out, and the bytes behind them."""

    def __init__(self) -> None:
        self.chosen: ProtocolId | None = None
        self.is_deaf = False
        """True if further data is ignored, because it belongs to a protocol that a `Chooser`
        has refused."""
        self._buffer = bytearray()
        self._greeted = False
        self._out = bytearray(_GREETING)

    @property
    def leftover(self) -> bytes:
        """Bytes behind the negotiation, which belong to the protocol. They are valid once
        `chosen` is set."""
        return bytes(self._buffer)

    def data_to_send(self) -> bytes:
        """Return, and forget, the bytes to send to the peer now; at first the header."""
        data = bytes(self._out)
        self._out.clear()
        return data

    def _feed(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data
        if not self._greeted and self._buffer.startswith(_GREETING):
            del self._buffer[: len(_GREETING)]
            self._greeted = True

    def _next_untrusted(self) -> str | None:
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


class Proposer(_Negotiation):
    """The dialer's side of a negotiation."""

    def __init__(self, protocol: ProtocolId) -> None:
        super().__init__()
        self._proposed = protocol
        self._out += line(protocol)

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Advance by received bytes.

        Raises:
            RemoteProtocolError: The peer broke the negotiation's rules.
            ProtocolNotSupported: The peer refused the proposal.
        """
        self._feed(data)
        if self.chosen is None and (text := self._next_untrusted()) is not None:
            if text == NOT_AVAILABLE:
                raise ProtocolNotSupported(f"the peer does not speak {self._proposed}")
            if text != self._proposed:
                raise RemoteProtocolError(
                    f"proposed {self._proposed}, the answer was {text[:40]!r}"
                )
            self.chosen = self._proposed


class Chooser(_Negotiation):
    """The listener's side of a negotiation."""

    def __init__(self, serves: Callable[[ProtocolId], bool]) -> None:
        super().__init__()
        self._serves = serves
        self.proposals = 0
        """Number of protocols that the peer has proposed."""

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Advance by received bytes. Raise `RemoteProtocolError` if they break the rules, or if
        the peer proposes without end.

        Bytes that make no sense behind a refused proposal are that protocol's data, sent
        optimistically (0-RTT). They are dropped, and the dialer gives up when it reads our
        answer.
        """
        if self.is_deaf:
            return
        self._feed(data)
        while self.chosen is None:
            try:
                text = self._next_untrusted()
            except BadMessage:
                if not self.proposals:
                    raise
                self.is_deaf = True
                self._buffer = bytearray()
                return
            if text is None:
                return
            self.proposals += 1
            if self.proposals > 32:  # go-libp2p's largest set has about a dozen
                raise RemoteProtocolError("more than 32 protocols proposed for one stream")
            protocol = ProtocolId(text)
            if self._serves(protocol):
                self.chosen = protocol
                self._out += line(text)
            else:
                self._out += line(NOT_AVAILABLE)
