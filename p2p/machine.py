"""The real `World`: this machine's clock, randomness, files and threads.

This file, `p2p.worker_process` and the transports are where Shoal touches the operating system;
everything else asks a `World`. Time is trio's, so tests on trio's own test clock work too.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import hashlib
import heapq
import itertools
import math
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import trio

from p2p.concurrency import Notifier, open_bare_nursery, require_trio
from p2p.door import check
from p2p.errors import StorageError, Unnameable
from p2p.identity import SEED_BYTES, KeyPair, Signer, Verify, verify
from p2p.naming import unencodable
from p2p.sandbox import Confinement, Containment
from p2p.wire import MIB
from p2p.worker_process import WorkerStarter
from p2p.world import Disk, DiskEntry, Worker

T = TypeVar("T")

KEY: Final = "key"
"""Name of the key file in a node's folder."""


def trim_memory() -> None:
    """Give back to the operating system what glibc keeps of freed memory.

    What floods leave behind is free memory between live blocks, which glibc does not return by
    itself: after 4,080 streams with unread answers 69 of 97 MiB, with as many objects alive as
    before. To ask first how much is free takes as long as to return it.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        # Bytes that a trim leaves at the end of the heap, for what comes next.
        libc.malloc_trim(ctypes.c_size_t(4 * MIB))


@contextlib.contextmanager
def full_collections_by_hand() -> Iterator[None]:
    """Let only `collect_garbage` run full garbage collections within the block.

    What is there at the beginning, mostly modules, will not be looked at again.
    """
    young, middle, old = gc.get_threshold()
    gc.collect()
    gc.freeze()
    # A threshold so high that Python never begins a full collection by itself.
    gc.set_threshold(young, middle, (2**31 - 1))
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()


def collect_garbage() -> None:
    """Collect garbage if many objects were created since the last time."""
    # A full collection is worth its time after so many of the middle generation: Python's own
    # threshold, 70,000 new objects. An idle node makes them in hours.
    if gc.get_count()[2] >= 10:
        gc.collect()


class RealTimer:
    """A callback that waits for the world's timer task."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Cancel the callback. Nothing happens if it was called already."""
        self.callback = None


class RealWorld:
    """A node's share of this machine. Open it with `open_world`."""

    def __init__(
        self, signer: Signer, folder: Path, mounts: Mapping[str, Path] | None = None
    ) -> None:
        self.signer: Signer = signer
        self.verify: Verify = verify
        self.disk: Disk = RealDisk(folder, mounts)
        self.cores = available_cores()
        self._timers: list[tuple[float, int, RealTimer]] = []
        self._order = itertools.count()
        self._sooner = Notifier()
        self._workers = WorkerStarter(folder, keys=[folder / KEY])
        self.is_closed = False
        """True if the block for which the world was opened has ended. No timer fires any
        more."""

    def now(self) -> float:
        """Return monotonic seconds."""
        return trio.current_time()  # noqa: TID251 - this is the clock

    def wall(self) -> float:
        """Return the seconds since 1970."""
        return time.time()  # noqa: TID251 - this is the clock

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        await trio.sleep(max(0.0, seconds))  # noqa: TID251 - this is the clock

    async def sleep_until(self, deadline: float) -> None:
        """Return at ``deadline``, at once if it has passed."""
        await trio.sleep_until(deadline)

    def call_at(self, when: float, callback: Callable[[], None]) -> RealTimer:
        """Call ``callback`` once at ``when``."""
        timer = RealTimer(callback)
        heapq.heappush(self._timers, (when, next(self._order), timer))
        if self._timers[0][2] is timer:
            self._sooner.notify_all()
        return timer

    async def run_timers(self) -> None:
        """Run the callbacks of `call_at`. One task runs this."""
        while True:
            while self._timers and self._timers[0][0] <= self.now():
                callback = heapq.heappop(self._timers)[2].callback
                if callback is not None:
                    callback()
            with trio.move_on_at(self._timers[0][0] if self._timers else math.inf):
                await self._sooner.wait()

    def keep_trimmed(self) -> None:
        """Give freed memory back, now and every second."""
        trim_memory()
        # Seconds between two calls of `trim_memory`. It is short because under a flood freed
        # and newly taken memory add up.
        self.call_at(self.now() + 1.0, self.keep_trimmed)

    def keep_collected(self) -> None:
        """Free garbage in cycles every ten seconds. If that takes long, the pause is longer, so
        that it takes a hundredth of the time.

        Python itself collects whenever its objects have grown by a quarter, which under a crowd
        stops the loop again and again.
        """
        before = self.now()
        collect_garbage()
        # Part of the time that may go to full collections: 0.3 s of the node above every 30.
        pause = max(10.0, (self.now() - before) / 0.01)
        self.call_at(self.now() + pause, self.keep_collected)

    def rng(self, purpose: str) -> Random:
        """Return a generator that is seeded by the machine."""
        return Random(f"{purpose}{secrets.randbits(128)}")

    def entropy(self, count: int) -> bytes:
        """Return random bytes fit for keys."""
        return secrets.token_bytes(count)

    async def run_blocking(self, function: Callable[..., T], *args: Any, cost: float) -> T:
        """Run a pure function in a thread. ``cost`` matters in simulations only."""
        return await trio.to_thread.run_sync(function, *args)

    def open_worker(
        self, argv: Sequence[str], *, name: str, confined: Confinement | None = None
    ) -> AbstractAsyncContextManager[Worker]:
        """Run ``python -m`` ``argv`` as a child for the length of the block."""
        return self._workers.open(argv, name, confined)

    async def containment(self) -> Containment:
        """Return how workers are contained on this machine, probed once. Raises
        `WorkerNotStarted` if the trial cannot run."""
        return await self._workers.containment()

    def trace(self, name: str, **fields: object) -> None:
        """Do nothing: only a simulation keeps a trace."""

    def buggify(self, name: str) -> bool:
        """Return False, since nothing misbehaves on purpose in production."""
        return False

    def sometimes(self, name: str, condition: bool) -> None:
        """Do nothing: only a sweep of simulations counts."""


class RealDisk:
    """Files below one folder. Every call runs in a thread: a slow disk never stops the node.

    The threads are the disk's own, so that neither proofs nor name servers hold up a write.
    """

    def __init__(self, folder: Path, mounts: Mapping[str, Path] | None = None) -> None:
        """Open the files below ``folder``. ``mounts`` maps names below ``folder`` to places
        elsewhere, since files that a pusher publishes stay where they are."""
        self._folder = folder
        self._mounts = dict(mounts or {})
        # Concurrent calls to the disk: as many as trio allows for everything.
        self._threads = trio.CapacityLimiter(40)

    def _path(self, path: str) -> Path:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path!r} is not inside the node's folder")
        first, _, rest = path.partition("/")
        mount = self._mounts.get(first)
        return self._folder / path if mount is None else mount / rest

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return await trio.to_thread.run_sync(function, *args, limiter=self._threads)
        except FileNotFoundError:
            raise
        except UnicodeEncodeError as error:
            raise Unnameable(unencodable(error)) from error
        except OSError as error:
            where = f": {error.filename}" if error.filename is not None else ""
            has_no_place = error.errno in (errno.ENAMETOOLONG, errno.EILSEQ)  # for the name
            kind = Unnameable if has_no_place else StorageError
            raise kind(f"{error.strerror or error}{where}") from error

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file."""
        return await self._run(_read, self._path(path), offset, length)

    async def write(
        self, path: str, data: bytes | memoryview, offset: int | None = None
    ) -> None:
        """Replace the whole file, or overwrite from ``offset``."""
        await self._run(_write, self._path(path), data, offset)

    async def append(self, path: str, data: bytes) -> None:
        """Write at the end."""
        await self._run(_append, self._path(path), data)

    async def reserve(self, path: str, size: int) -> None:
        """Make room for a file of ``size`` bytes."""
        await self._run(_reserve, self._path(path), size)

    async def fsync(self, path: str) -> None:
        """Return once the file and its name would survive a crash."""
        await self._run(_fsync, self._path(path), self._path(path).parent)

    async def replace(self, path: str, data: bytes | memoryview) -> None:
        """Atomically and durably put ``data`` at ``path``."""
        await self._run(_replace, self._path(path), data)

    async def rename(self, old: str, new: str) -> None:
        """Atomically and durably move a file or a folder."""
        await self._run(_rename, self._path(old), self._path(new))

    async def remove(self, path: str) -> None:
        """Remove a file or folder."""
        await self._run(_remove, self._path(path))

    async def list(self, folder: str) -> list[str]:
        """Return the sorted names in ``folder``."""
        return await self._run(_list, self._path(folder))

    async def walk(self, path: str, most: int) -> Sequence[DiskEntry]:
        """Return the files at or below ``path``."""
        return await self._run(_walk, self._path(path), most)

    async def size(self, path: str) -> int | None:
        """Return the bytes of a file; None if it does not exist."""
        file = self._path(path)
        return await self._run(lambda: file.stat().st_size if file.is_file() else None)

    async def free(self) -> int:
        """Return the free bytes of the file system."""
        return await self._run(lambda: shutil.disk_usage(self._folder).free)

    @contextmanager
    def holding(self, path: str) -> Iterator[None]:
        """Keep other processes from a folder for the length of the block."""
        descriptor = _open_lock(self._path(path))
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def locate(self, path: str) -> str:
        """Return the absolute path, for worker processes."""
        return str(self._path(path).absolute())


def _read(path: Path, offset: int, length: int | None) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read() if length is None else file.read(length)


def _write(path: Path, data: bytes | memoryview, offset: int | None) -> None:
    if offset is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return
    with _opened(path) as descriptor:
        view = memoryview(data)
        while view:
            done = os.pwrite(descriptor, view, offset)
            view, offset = view[done:], offset + done


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yield a descriptor for writing, for the length of the block. File and folders are made if
    need be.

    Each call to the system costs a thread its turn, and on a busy machine it waits for the next
    one: with 14 processes on two cores 3 ms and more each time. ``mkdir`` and Python's file
    objects would make ten calls of these three.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # read-only, as a pusher's file was
        if not path.exists():
            raise
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
        descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _reserve(path: Path, size: int) -> None:
    with _opened(path) as descriptor:
        if not size:
            return
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        elif os.fstat(descriptor).st_size < size:  # macOS: it is found out when it is full
            os.ftruncate(descriptor, size)


def _append(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def _fsync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _replace(path: Path, data: bytes | memoryview, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The final name is left out, as it may already have the greatest length.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".shoal-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp's 0600 would lock out other users who may read the folder
        Path(temporary).chmod(mode)
        _rename(Path(temporary), path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _rename(old: Path, new: Path) -> None:
    new.parent.mkdir(parents=True, exist_ok=True)
    old.replace(new)
    _fsync(new.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _list(path: Path) -> list[str]:
    # Dot files are what `_replace` leaves behind when it is killed half-way, and no file.
    found = path.iterdir() if path.is_dir() else ()
    return sorted(entry.name for entry in found if not entry.name.startswith("."))


def _walk(path: Path, most: int) -> list[DiskEntry]:
    found: list[DiskEntry] = []
    if path.is_file():
        found.append(_disk_entry("", path.stat()))
    folders = [path] if path.is_dir() else []
    while folders and len(found) < most:
        with os.scandir(folders.pop()) as inside:
            for entry in inside:
                if len(found) >= most:
                    break
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                    continue
                name = Path(entry.path).relative_to(path).as_posix()
                follows = entry.is_symlink() and _is_followed(path, Path(entry.path))
                found.append(_disk_entry(name, entry.stat(follow_symlinks=follows)))
    return sorted(found, key=lambda entry: entry.path)


def _is_followed(folder: Path, link: Path) -> bool:
    """Return True if a link leads to a file in its own folder, or from a snapshot of Hugging
    Face's cache to the same model's blobs; anything else could be a private file."""
    target, place = link.resolve(), folder.resolve()
    blobs = place.parent.parent / "blobs"
    is_snapshot = place.parent.name == "snapshots" and target.parent == blobs
    is_hidden = any(name.startswith(".") for name in target.parts[len(place.parts) :])
    is_inside = target.is_relative_to(place) and not is_hidden
    return (is_snapshot or is_inside) and target.is_file()


def _disk_entry(path: str, status: os.stat_result) -> DiskEntry:
    return DiskEntry(path, status.st_size, status.st_mtime_ns, stat.S_ISREG(status.st_mode))


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _open_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock; None on Windows, or on a disk without locks."""
    try:
        import fcntl  # not at the top: Windows has none, and is told so by `p2p.node.process`

        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise StorageError(f"another process is using {path.parent}") from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def raise_descriptor_limit() -> int:
    """Raise the soft limit on files and sockets as far as allowed and needed; return the new
    limit."""
    import resource  # not at the top: Windows has none, and is told so by `p2p.node.process`

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Thirty times what a node needs. Some kernels allow billions, and some libraries iterate
    # over all of them.
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS names a limit that it does not grant
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def load_or_create_key(path: Path) -> KeyPair:
    """Return the key in ``path``, which is made (mode 0600, synced) if it does not exist.
    Raises `StorageError`.

    The file is the seed and its checksum.
    """
    try:
        if not path.exists():
            seed = secrets.token_bytes(SEED_BYTES)
            _replace(path, seed + _key_checksum(seed), 0o600)
        data = path.read_bytes()
        path.chmod(0o600)
    except OSError as error:
        raise StorageError(f"the key cannot be used: {error}") from error
    return decode_key(path, data)


def decode_key(path: Path, data: bytes) -> KeyPair:
    """Return the key that the file at ``path`` contains. Raises `StorageError` if it is
    damaged."""
    seed, check = data[:SEED_BYTES], data[SEED_BYTES:]
    if len(seed) < SEED_BYTES or (check and check != _key_checksum(seed)):
        raise StorageError(
            f"{path} is damaged, or no key: restore it from a copy, or remove it, and the node"
            " gets a new key and with it another name (a node with a ledger/ then needs an"
            " empty one, too)"
        )
    return KeyPair(seed)


def _key_checksum(seed: bytes) -> bytes:
    # With a prefix: the file must not hold part of a plain digest of the secret.
    # Bytes behind the seed in a key file. Any 32 bytes are a key: with one bit flipped a node
    # would be another peer, and hear of it only from those who do not know it. Files of 32
    # bytes, without it, are taken too.
    return hashlib.sha256(b"shoal key file" + seed).digest()[:8]


@asynccontextmanager
async def open_world(
    data: Path | str | None = None,
    key: KeyPair | None = None,
    *,
    trims: bool = False,
    mounts: Mapping[str, Path] | None = None,
) -> AsyncIterator[RealWorld]:
    """Open a world over the folder ``data`` (temporary if None), signing with ``key``
    (``data/key`` if None).

    A process that is a node and nothing else ``trims``: it returns freed memory every second,
    and collects garbage in cycles every ten. ``mounts`` maps names to places elsewhere
    (`p2p.machine.RealDisk`).
    """
    require_trio()
    if data is not None:
        check("data", data, Path, str)
    if key is not None:
        check("key", key, KeyPair)
    with contextlib.ExitStack() as stack:
        folder = Path(data or stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        world = RealWorld(key or load_or_create_key(folder / KEY), folder, mounts)
        async with open_bare_nursery() as nursery:
            nursery.start_soon(world.run_timers)
            if trims:
                stack.enter_context(full_collections_by_hand())
                world.keep_trimmed()
                world.keep_collected()
            try:
                yield world
            finally:
                world.is_closed = True
                nursery.cancel_scope.cancel()
