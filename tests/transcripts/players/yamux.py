"""Yamux's transcripts: a connection of two machines, ``ann``, which dialled, and ``bob``.

    SIDE open                   opens a stream; its number is written below
    SIDE send STREAM KIB        its application offers so many KiB
    SIDE end STREAM             its application has nothing more to send
    SIDE read STREAM KIB        its application reads what has come
    SIDE leave STREAM           its application reads no more, and something is lost by that
    SIDE reset STREAM           its application abandons the stream
    SIDE overrun STREAM KIB     a frame of so much that its machine would not have sent
    SIDE flush                  what waits to be sent travels to the other side
    wait SECONDS

Below a step stand what the machine answers, the frames that travel (neighbouring DATA frames of
one stream as one line) and what they make happen; then what it has changed of a stream: at the
sender how much it may send, how much is queued, at the receiver what it grants.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from p2p.transport.core import yamux as ym
from p2p.transport.core.budget import HostBudget
from p2p.wire import KI
from tests.transcripts import changes, player

TYPES: Final = ("DATA", "WINDOW_UPDATE", "PING", "GO_AWAY")
FLAGS: Final = {ym.SYN: "SYN", ym.ACK: "ACK", ym.FIN: "FIN", ym.RST: "RST"}


@player("yamux")
class YamuxPlayer:
    """Both sides of one connection, and the bytes between them."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sides = {
            name: ym.Mux(dialer=name == "ann", budget=HostBudget(lambda: self._now))
            for name in ("ann", "bob")
        }

    def play(self, command: str, args: list[str]) -> Iterator[str]:
        if command == "wait":
            self._now += float(args[0])
            return
        if command not in self._sides or not args:
            raise ValueError(f"no such step: {command}")
        before = self._state()
        verb, *words = args
        if verb == "flush":
            yield from self._flush(command)
        elif verb == "overrun":
            number, size = int(words[0]), int(words[1]) * KI
            frame = ym.HEADER.pack(0, ym.DATA, 0, number, size) + bytes(size)
            yield from self._travel(command, bytearray(frame))
        else:
            yield from self._do(self._sides[command], verb, [int(word) for word in words])
        for name in self._sides:
            yield from self._news(name)
        yield from changes(before, self._state())

    def _do(self, mux: ym.Mux, verb: str, numbers: list[int]) -> Iterator[str]:
        match verb, numbers:
            case "open", []:
                yield f"stream {mux.open_stream()}"
            case "send", [stream, kib]:
                taken = mux.send(stream, memoryview(bytes(kib * KI)))
                yield f"{show(taken)} of {kib} KiB taken"
            case "end", [stream]:
                mux.send_end(stream)
            case "read", [stream, kib]:
                mux.consumed(stream, kib * KI)
            case "leave", [stream]:
                mux.stop_receiving(stream, unread=True)
            case "reset", [stream]:
                mux.reset(stream)
            case _:
                raise ValueError(f"no such step: {verb}")

    # Bytes on their way.

    def _flush(self, sender: str) -> Iterator[str]:
        data = bytearray()
        while (piece := self._sides[sender].data_to_send()) is not None:
            data += piece
        yield from self._travel(sender, data)

    def _travel(self, sender: str, data: bytearray) -> Iterator[str]:
        receiver = "bob" if sender == "ann" else "ann"
        yield from (f"{sender} -> {receiver}: {said}" for said in show_frames(data))
        events = self._sides[receiver].receive_data(data)
        yield from (f"{receiver}: {said}" for said in show_events(events))

    def _news(self, name: str) -> Iterator[str]:
        mux = self._sides[name]
        yield from (f"{name}: stream {each} is over" for each in mux.take_closed())
        for each in mux.take_writable():
            if (stream := mux._streams.get(each)) is not None and not stream.finished:
                yield f"{name}: stream {each} may send again"

    # State.

    def _state(self) -> dict[str, str]:
        return {
            f"stream {number} of {name}": show_stream(stream)
            for name, mux in self._sides.items()
            for number, stream in mux._streams.items()
        }


def show(size: int) -> str:
    return f"{size / KI:.6g} KiB"


def show_stream(stream: ym.MuxStream) -> str:
    parts = [
        f"may send {show(stream.send_window)}",
        f"{show(stream.queued)} queued",
        f"grants {show(stream.receive_window)} of {show(stream.window)}",
    ]
    marks = {
        "ended": stream.finished,
        "the peer ended": stream.remote_finished,
        "does not read": stream.deaf,
    }
    return ", ".join([*parts, *(mark for mark, holds in marks.items() if holds)])


def show_frames(data: bytearray) -> Iterator[str]:
    """The frames of a byte string that holds whole frames; a run of DATA frames as one."""
    at, run, count, total = 0, -1, 0, 0
    while at < len(data):
        _, kind, flags, number, length = ym.HEADER.unpack_from(data, at)
        at += ym.HEADER.size + (length if kind == ym.DATA else 0)
        if count and (kind != ym.DATA or flags or number != run):
            yield show_data(run, count, total)
            count = total = 0
        if kind == ym.DATA and not flags:
            run, count, total = number, count + 1, total + length
        else:
            names = " ".join([TYPES[kind], *(n for bit, n in FLAGS.items() if flags & bit)])
            yield f"{names} stream {number}" + (f", {show(length)}" if length else "")
    if count:
        yield show_data(run, count, total)


def show_data(stream: int, count: int, total: int) -> str:
    frames = "1 frame" if count == 1 else f"{count} frames"
    return f"DATA stream {stream}, {show(total)} in {frames}"


def show_events(events: list[ym.Event]) -> Iterator[str]:
    """What happened; bytes of one stream that follow each other as one line."""
    stream, size = 0, 0
    for event in [*events, None]:
        if size and not (isinstance(event, ym.DataReceived) and event.stream_id == stream):
            yield f"stream {stream} received {show(size)}"
            size = 0
        match event:
            case ym.DataReceived(stream_id=stream, data=data):
                size += len(data)
            case ym.StreamOpened(stream_id=number):
                yield f"stream {number} was opened"
            case ym.EndReceived(stream_id=number):
                yield f"stream {number} was ended"
            case ym.StreamReset(stream_id=number):
                yield f"stream {number} was reset"
            case ym.ProtocolViolated(reason=reason):
                yield f"protocol violated: {reason}"
