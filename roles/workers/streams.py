"""The standard streams of a worker process: frames in, frames out, and nothing else.

A frame is msgpack behind its 4-byte big-endian length (`p2p.world.World.open_worker`). Whatever
prints goes to standard error, so that no library can garble a frame. When standard input ends,
by the node's wish or by its death, the process ends at once, whatever it is doing.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

from roles.engines import codec


def serve_streams(
    serve: Callable[[Callable[[], bytes], Callable[[bytes], None]], None],
) -> None:
    """Call ``serve(receive, send)`` with the frames of the standard streams."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the node too, and it ends us
    frames = _claim_stdout()
    # bounded by the node: one call at a time
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    reader = threading.Thread(
        target=_read_frames, args=(sys.stdin.buffer, requests.put), daemon=True
    )
    reader.start()
    serve(requests.get, lambda payload: _write_frame(frames, payload))


def _claim_stdout() -> BinaryIO:
    """Standard output for frames alone; from now on whatever prints does so on standard
    error."""
    frames = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr
    return frames


def _read_frames(source: BinaryIO, deliver: Callable[[bytes], None]) -> None:
    """Deliver frames until ``source`` ends, then end the process."""
    while True:
        head = source.read(codec.LENGTH_BYTES)
        length = int.from_bytes(head, "big")
        body = (
            source.read(length)
            if len(head) == codec.LENGTH_BYTES and length <= codec.MAX_FRAME
            else b""
        )
        if not body or len(body) < length:
            os._exit(0)
        deliver(body)


def _write_frame(target: BinaryIO, payload: bytes) -> None:
    if len(payload) > codec.MAX_FRAME:
        raise ValueError(
            f"a reply of {len(payload)} bytes is over the limit of {codec.MAX_FRAME}"
        )
    try:
        target.write(len(payload).to_bytes(codec.LENGTH_BYTES, "big") + payload)
        target.flush()
    except BrokenPipeError:  # the node ended while we worked for it
        os._exit(0)
