"""Worker processes of the real world: started, spoken to, and ended.

Theory of operation
-------------------
A worker speaks frames over the pipes of a child. What confines it stands in front of its
command (`p2p.sandbox`), and passes the pipes on as they are. A confined worker says that it is
ready before it is spoken to: by then its limits are in force. What it prints is read while a
call is under way, and no faster than it is forgotten: the first lines go to the log, and one
that prints without end is ended.

Between calls a stranger's worker is stopped: a thread that it left behind
computes no further, and neither does what a call has taught it to do in our time.

With its process ends all that it started. Where ``bwrap`` contains it, its process is the first
of a machine of its own, which the kernel ends with it, and with the node: ``bwrap`` dies with
its parent. The kernel means the *thread* that started it, so processes are started in the
thread of the event loop, which takes a millisecond or two, and not in one of trio's, which
ends when it has had nothing to do for ten seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import trio

from p2p.errors import LimitExceeded, ShoalError, WorkerDied, WorkerNotStarted
from p2p.sandbox.confinement import CHATTER, HEARD, REPLY, Confinement, Containment
from p2p.sandbox.entry import READY
from p2p.sandbox.launch import Launch, find_containment, launch, try_containment
from p2p.wire import KI, MIB

T = TypeVar("T")

logger = logging.getLogger(__name__)

KILL_AFTER: Final = 1.0
"""Seconds in which a child must end after its input has ended. Ours end at once
(`roles.engines.worker`); one that does not hangs."""


class WorkerStarter:
    """Starts the workers of one world, and knows how this machine contains them."""

    def __init__(self, folder: Path, keys: Sequence[Path]) -> None:
        """Start workers for a world whose folder is ``folder``. ``keys`` are files that no
        worker may read."""
        self._folder = str(folder.absolute())
        self._keys = [str(key.absolute()) for key in keys]
        self._turn = trio.Lock()
        self._found: Containment | None = None
        self._for_machine: Containment | None = None

    async def containment(self) -> Containment:
        """Return how strangers' code is contained here, tried once. Raises `WorkerNotStarted`
        if the trial cannot run."""
        async with self._turn:
            if self._found is None:
                self._found = await _tried(find_containment, self._folder)
            return self._found

    async def _with_machine(self, found: Containment) -> Containment:
        """Return the containment of workers that see the machine. Their mounts differ, and may
        fail where the others do not."""
        async with self._turn:
            if self._for_machine is None:
                reason = found.reason
                if found.holds:
                    trial = Confinement(sees_machine=True)
                    reason = await _tried(try_containment, found, trial, self._folder)
                if reason:
                    logger.warning("engines run as any program of yours does: %s", reason)
                self._for_machine = Containment(reason=reason) if reason else found
            return self._for_machine

    @asynccontextmanager
    async def open(
        self, argv: Sequence[str], name: str, confined: Confinement | None
    ) -> AsyncIterator[ProcessWorker]:
        """Open a worker, as `p2p.world.World.open_worker` describes."""
        start = Launch((sys.executable, "-m", *argv), os.environ)
        if confined is not None:
            found = await self.containment()
            if confined.required and not found.holds:
                raise WorkerNotStarted(f"{name} must not run uncontained; containment: {found}")
            if confined.sees_machine:
                found = await self._with_machine(found)
            start = await trio.to_thread.run_sync(self._launch, argv, confined, found)
        try:
            worker = ProcessWorker(start, name, confined)
        except OSError as error:
            raise _refused(name, error) from error
        try:
            if confined is not None:
                await worker.wait_ready()
            yield worker
        finally:
            with trio.CancelScope(shield=True):
                await worker.aclose()

    def _launch(
        self, argv: Sequence[str], confined: Confinement, containment: Containment
    ) -> Launch:
        for folder in confined.writable:
            Path(folder).mkdir(parents=True, exist_ok=True)
        return launch(argv, confined, containment, folder=self._folder, keys=self._keys)


async def _tried(trial: Callable[..., T], *args: object) -> T:
    """Return the result of a trial of containment. Raises `WorkerNotStarted` if it cannot
    run."""
    try:
        return await trio.to_thread.run_sync(trial, *args)
    except OSError as error:
        raise _refused("a trial of containment", error) from error


def _refused(name: str, error: OSError) -> WorkerNotStarted:
    return WorkerNotStarted(
        f"the machine starts no process for {name} ({error.strerror}): give it more"
        " memory, or this user more processes (ulimit -u) and open files (ulimit -n)"
    )


class ProcessWorker:
    """Frames over the pipes of a child: 4 bytes of big-endian length, then the payload."""

    def __init__(self, start: Launch, name: str, confined: Confinement | None) -> None:
        """Start the process. Raises `OSError` if the system refuses."""
        is_stranger = confined is not None and not confined.sees_machine
        self._process = process = subprocess.Popen(
            start.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if is_stranger else None,
            # A fixed hash seed gives sets of text one order in every worker: with another order
            # five of the 106 families of reasoning-gym make a different task of a seed.
            env={**start.variables, "PYTHONHASHSEED": "0"},
            process_group=0,  # with what it starts, which ends with it
            bufsize=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._name = name
        self._is_nested = start.is_nested
        # Bytes of one request or reply of a worker that is not confined: our own child, so this
        # only stops a runaway, not an attacker.
        self._most = (1024 * MIB) if confined is None else REPLY
        self._rests = start.is_nested and is_stranger
        self._stdin = _stream_of(process.stdin.fileno())
        self._stdout = _stream_of(process.stdout.fileno())
        self._stderr = None if process.stderr is None else _stream_of(process.stderr.fileno())
        self._ended = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
        """Descriptor that becomes readable when the child has ended; None where the system has
        none."""
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        self._unheard = HEARD
        """Bytes of its output that may still go to the log."""
        self._last_line = "it said nothing"
        self._inner: list[int] = []
        """The first process of the worker's namespace."""
        self._resting: list[int] = []
        """Descriptors of the processes that are stopped between calls. Process ids would not
        do, since they are reused."""
        self._turn = trio.Lock()

    @property
    def pid(self) -> int:
        """Process id of the child, or of the program that contains it."""
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """Process ids of the child, and of the process inside its container."""
        return [self._process.pid, *self._inner]

    async def wait_ready(self) -> None:
        """Return when the limits of a confined worker are in force. Raises
        `WorkerNotStarted` if that takes two minutes; it takes a tenth of a second."""
        with trio.move_on_after(120.0) as scope:
            said = await self._heard(self._read_ready)
            if said == READY:
                self._inner = _children_of(self._process.pid) if self._is_nested else []
                self._resting = self._find_resting() if self._rests else []
                self._signal(signal.SIGSTOP)
                return
        await self._hear_out()
        why = "in 120 s" if scope.cancelled_caught else f"({self._last_line})"
        raise WorkerNotStarted(f"the process of {self._name} did not become ready {why}")

    async def _read_ready(self) -> bytes:
        try:
            return await self._read(len(READY))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def call(self, request: bytes) -> bytes:
        """Send a request and return the reply. Raises `WorkerDied`, also if an earlier call was
        cancelled on its way."""
        async with self._turn:
            is_whole = False
            self._signal(signal.SIGCONT)
            try:
                answer = await self._heard(partial(self._exchange, request))
                is_whole = isinstance(answer, bytes)
            finally:
                if is_whole:
                    self._signal(signal.SIGSTOP)
                else:  # half a call is in the pipe: it cannot take another
                    self._kill()
        if isinstance(answer, bytes):
            return answer
        raise answer

    async def _heard(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do ``work``, and meanwhile read the child's output."""
        if self._stderr is None:
            return await work()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen, self._stderr)
            done = await work()
            nursery.cancel_scope.cancel()
        return done

    async def _listen(self, stream: trio.lowlevel.FdStream) -> None:
        """Read output until it ends, and kill the child if it exceeds its limit."""
        left = CHATTER
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            # Bytes of a worker's output read at a time: the capacity of a pipe.
            while data := await stream.receive_some(64 * KI):
                self._log(data)
                left -= len(data)
                if left < 0:
                    logger.info("%s printed more than it may in one call", self._name)
                    self._kill()
                    return

    def _log(self, data: bytes) -> None:
        """Log output line by line. Control characters are escaped, since it may quote a
        stranger."""
        text = data[: self._unheard].decode("utf-8", "backslashreplace")
        self._unheard -= min(self._unheard, len(data))
        for line in text.splitlines():
            if line.strip():
                self._last_line = line.encode("unicode_escape").decode("ascii")
                logger.info("%s prints: %s", self._name, self._last_line)

    async def _exchange(self, request: bytes) -> bytes | ShoalError:
        """Return the reply, or an error that explains why none came."""
        async with trio.open_nursery() as nursery:
            if self._ended is not None:
                nursery.start_soon(self._let_go, self._ended)
            answer = await self._ask(request)
            nursery.cancel_scope.cancel()
        return answer

    async def _let_go(self, ended: int) -> None:
        """Kill the processes that an ended child has started and that hold its pipes. Processes
        outside our groups keep the pipes."""
        await trio.lowlevel.wait_readable(ended)
        self._kill_group()
        await trio.sleep(KILL_AFTER)  # noqa: TID251 - no world
        await self._stdout.aclose()

    async def _ask(self, request: bytes) -> bytes | ShoalError:
        try:
            await self._stdin.send_all(len(request).to_bytes(4, "big") + request)
            length = int.from_bytes(await self._read(4), "big")
            if length > self._most:
                return LimitExceeded(
                    f"{self._name} answered with {length} bytes (at most {self._most})"
                )
            return await self._read(length)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # Its pipe ends before it does: how it ended is what its operator must know.
            with trio.move_on_after(KILL_AFTER):
                await self._wait()
            code = self._process.poll()
            self._kill()
            return WorkerDied(f"the worker process of {self._name} ended (exit {code})")

    async def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = await self._stdout.receive_some(min(count - len(data), MIB))
            if not piece:
                raise trio.BrokenResourceError
            data += piece
        return bytes(data)

    async def _wait(self) -> None:
        await trio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)

    async def aclose(self) -> None:
        """End the child: first by ending its input, then by force.

        A contained child is ended by force at once, which is as good.
        """
        await self._stdin.aclose()
        if not self._is_nested:
            with trio.move_on_after(KILL_AFTER):
                await self._wait()
        self._kill()
        with trio.move_on_after(KILL_AFTER):
            await self._wait()
        self._kill_group()
        await self._wait()
        while self._resting:
            os.close(self._resting.pop())
        if self._ended is not None:
            os.close(self._ended)
            self._ended = None
        for orphan in self._inner:
            with contextlib.suppress(ChildProcessError):
                await trio.to_thread.run_sync(os.waitpid, orphan, 0)
        await self._hear_out()
        await self._stdout.aclose()
        if self._stderr is not None:
            await self._stderr.aclose()

    async def _hear_out(self) -> None:
        """Read the last output of an ending child."""
        if self._stderr is not None:
            with trio.move_on_after(KILL_AFTER):
                await self._listen(self._stderr)

    def _find_resting(self) -> list[int]:
        """Return descriptors of the processes of a worker that has just begun, which is the
        worker alone."""
        found = []
        for pid in (pid for first in self._inner for pid in _children_of(first)):
            with contextlib.suppress(OSError):  # Linux before 5.3, or it has ended
                found.append(os.pidfd_open(pid))
        return found

    def _signal(self, number: signal.Signals) -> None:
        for process in self._resting:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)

    def _kill(self) -> None:
        """Kill the child and all processes that it started. A process of a library or a
        stranger would otherwise go on computing, and keep the pipe open, when its parent is
        gone.

        Of a contained child, the first process of its namespace is killed; the child then ends
        by itself.
        """
        inner = _children_of(self._process.pid) if self._is_nested else []
        for child in inner:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if not inner:
            self._kill_group()

    def _kill_group(self) -> None:
        """Kill the child's process group. While one of its processes lives, no other group gets
        its number."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _children_of(pid: int) -> list[int]:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:  # it has ended
        return []
    return list(map(int, words))


def _stream_of(descriptor: int) -> trio.lowlevel.FdStream:
    return trio.lowlevel.FdStream(os.dup(descriptor))
