"""The worker's side: an object whose methods are called over the standard streams.

Whatever prints goes to standard error, so that no library can garble a frame. When standard
input ends, by the node's wish or by its death, the process ends at once, whatever it is doing.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, Final

from p2p.errors import ShoalError
from roles.workers.calls import (
    MAX_FRAME,
    decode_request,
    encode_reply,
    failure_of,
    read_frame,
    write_frame,
)

CAUSED: Final = (ShoalError, OSError, ValueError, RuntimeError, MemoryError)
"""Errors that a caller or its machine can cause, such as a missing file or a shape that does
not fit."""


def serve(
    server: object,
    *,
    caused: tuple[type[Exception], ...] = CAUSED,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Answer each call by the method of ``server`` with its name, until standard input ends.

    What is among ``caused`` comes back as a `Failure`. Anything else is a bug: it ends the
    process with a traceback, and the node sees `WorkerDied`. ``after`` is called when a method
    has been answered.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the node too, and it ends us
    frames = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr
    # bounded by the node: one call at a time
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(sys.stdin.buffer, requests), daemon=True)
    reader.start()
    own = os.getpid()
    while True:
        method, arguments = decode_request(requests.get())
        if method.startswith("_"):
            raise TypeError(f"{method} is no method that may be called")
        try:
            value = getattr(server, method)(*arguments)
        except caused as error:
            value = failure_of(error)
        if os.getpid() != own:  # a method has forked: one of the two answers
            os._exit(0)
        reply = encode_reply(value)
        if len(reply) > MAX_FRAME:
            raise ValueError(
                f"{method}: a reply of {len(reply)} bytes is over the limit of {MAX_FRAME}"
            )
        try:
            write_frame(frames, reply)
        except BrokenPipeError:  # the node ended while we worked for it
            os._exit(0)
        after()


def _read(source: BinaryIO, requests: queue.SimpleQueue[bytes]) -> None:
    """Queue frames until ``source`` ends, then end the process."""
    while frame := read_frame(source):
        requests.put(frame)
    os._exit(0)
