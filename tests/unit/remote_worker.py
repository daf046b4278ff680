"""A worker with a method for each thing that a worker may do."""

from __future__ import annotations

import errno
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from p2p.errors import ConfigError
from roles.workers.files import MappedRecords, RecordFile, write_records
from roles.workers.server import serve


class Server:
    def configure(self, start: int) -> str:
        print("noise of a library", flush=True)  # noqa: T201
        os.write(1, b"noise of C code")
        if start < 0:
            raise ConfigError("start is negative: count from 0")
        self._total = start
        return "ready"

    def add(self, number: int) -> int:
        self._total += number
        return self._total

    def echo(self, value: Any) -> Any:
        return value

    def longest(self, file: list[Any], answer: str) -> RecordFile:
        records = MappedRecords(RecordFile(*file), bytes)
        return write_records(answer, [max(records, key=len), b"", *records[:2]])

    def fail(self, kind: str) -> None:
        match kind:
            case "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            case "memory":
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            case "quotes":
                raise ConfigError("weights: \ud800" + "x" * 10**6)
            case "bug":
                raise LookupError("as planned")
            case _:
                raise ConfigError(kind)

    def die(self, mark: str, times: int) -> int:
        """Die in so many processes, then answer."""
        with open(mark, "ab") as file:
            file.write(b"x")
        died = Path(mark).stat().st_size
        if died <= times:
            os._exit(3)
        return died

    def hang(self) -> None:
        threading.Event().wait()

    def fork(self, number: int) -> int:
        """Answer in two processes."""
        os.fork()
        return number

    def abandon(self) -> None:
        """Die, and leave a process of another group behind that holds the pipe."""
        if not os.fork():
            os.setsid()
            threading.Event().wait(60)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    def garble(self, data: bytes) -> None:
        """Write into the pipe of the replies, and hang."""
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if int(name) > 2 and os.readlink(f"/proc/self/fd/{name}").startswith("pipe"):
                    os.write(int(name), data)
        self.hang()

    def lay(self, what: str, path: str, target: str) -> RecordFile:
        """Put something at ``path`` that is no file of records."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        match what:
            case "pipe":
                os.mkfifo(path)
            case "link":
                os.symlink(target, path)
        return RecordFile(target if what == "elsewhere" else path, [6])

    def _private(self) -> None: ...


if __name__ == "__main__":
    serve(Server())
