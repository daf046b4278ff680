"""A worker that tries every door: ``python -m tests.attacks.spies``, or as an environment.

It answers each frame, the name of a door and what it needs to know, with what it found there.
``open`` is a door that was open; all else is what kept it shut.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from roles.workers.server import serve

DOORS: dict[str, Callable[..., object]] = {}
GIB: Final = 1 << 30


CALLS: dict[str, Callable[..., tuple[object, ...]]] = {
    "memory_read": lambda pid: ("process_vm_readv", pid, None, 0, None, 0, 0),
    "trace": lambda pid: ("ptrace", 16, pid, None, None),  # PTRACE_ATTACH
    "trace_me": lambda: ("ptrace", 0, 0, None, None),
    "new_namespace": lambda: ("unshare", 0x10000000),
    "mounted": lambda: ("mount", b"none", b"/tmp", b"tmpfs", 0, None),
    "keys": lambda: ("syscall", 248, b"user", b"spy", b"x", 1, -2),  # add_key on x86_64
    "keyring": lambda: ("syscall", 250, 0, -2, 1),  # KEYCTL_GET_KEYRING_ID of the process's
    "share_memory": lambda: ("shmget", 0, GIB, 0o1600),
    # two sockets that are joined to each other
    "pair": lambda family, kind: ("socketpair", family, kind, 0, (ctypes.c_int * 2)()),
    # one of the machine's places for asynchronous reads (io_setup on x86_64)
    "reserve_reads": lambda: ("syscall", 206, 1, ctypes.byref(ctypes.c_ulong())),
    # everything that waits for the machine's disks (sync on x86_64)
    "write_back": lambda: ("syscall", 162),
}
"""Doors that are a call of the C library, and what it is called with."""


def door(work: Callable[..., object]) -> Callable[..., object]:
    DOORS[work.__name__] = work
    return work


def attempt(name: str, arguments: list[Any]) -> str:
    """What came of a door, in a word."""
    try:
        if name in CALLS:
            call(*CALLS[name](*arguments))
            return "open"
        value = DOORS[name](*arguments)
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        return type(error).__name__
    return "open" if value else "shut"


@door
def read(path: str) -> object:
    with open(path, "rb") as file:
        return file.read(1)


@door
def listed(path: str) -> object:
    return os.listdir(path)


@door
def write(path: str) -> object:
    """Whether it could be written. It is not: the doors of other machines may be open."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
    return True


@door
def chmod(path: str) -> object:
    os.chmod(path, os.stat(path).st_mode)
    return True


@door
def connect(kind: str, address: Any) -> object:
    family = {"tcp": socket.AF_INET, "unix": socket.AF_UNIX, "abstract": socket.AF_UNIX}[kind]
    with socket.socket(family) as opened:
        opened.settimeout(2.0)
        opened.connect("\0" + address if kind == "abstract" else _address(address))
    return True


def _address(address: Any) -> Any:
    return tuple(address) if isinstance(address, list) else address


@door
def send_udp(port: int) -> object:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        return opened.sendto(b"x", ("127.0.0.1", port))


@door
def netlink() -> object:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as opened:
        opened.bind((0, 0))
    return True


@door
def interfaces() -> object:
    return [name for _, name in socket.if_nameindex() if name != "lo"]


@door
def memory_of(pid: int) -> object:
    with open(f"/proc/{pid}/mem", "rb") as file:
        file.seek(0x400000)
        return file.read(1)


@door
def environment_of(pid: int) -> object:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return b"PATH=" in file.read()


@door
def own_environment() -> object:
    return [name for name in os.environ if "SECRET" in name]


@door
def variable(name: str) -> object:
    return name in os.environ


def call(name: Any, *arguments: Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


@door
def no_new_privileges() -> object:
    """``PR_GET_NO_NEW_PRIVS``."""
    return call("prctl", 39, 0, 0, 0, 0) == 1


@door
def kill(pid: int) -> object:
    os.kill(pid, 0)
    return True


@door
def other_processes() -> object:
    return [name for name in os.listdir("/proc") if name.isdecimal() and int(name) > 64]


@door
def start_processes() -> object:
    """A fork bomb: each child forks on, for as long as it can."""
    if os.fork() == 0:
        while True:
            try:
                os.fork()
            except OSError:
                signal.pause()
    return True


@door
def start_threads(most: int) -> object:
    until, started = threading.Event(), 0
    threading.stack_size(1 << 16)
    try:
        for _ in range(most):
            threading.Thread(target=until.wait, daemon=True).start()
            started += 1
    finally:
        until.set()
    return started == most


@door
def map_memory(size: int) -> object:
    with mmap.mmap(-1, size) as mapped:
        for place in range(0, size, mmap.PAGESIZE):
            mapped[place] = 1
    return True


@door
def hide_memory() -> object:
    """In a file that is nowhere, and counted by nobody."""
    return os.memfd_create("spy") > 0


@door
def fill(path: str, size: int) -> object:
    """A file of this size, or as much as there is room for, in many."""
    block = bytes(1 << 20)
    written = 0
    for number in range(size // GIB + 8):
        with open(f"{path}{number}", "wb") as file:
            try:
                while written < size:
                    written += file.write(block)
                    file.flush()
            except OSError:
                continue
    return written >= size


@door
def raise_limits() -> object:
    """Whether a limit that was set can be lifted again."""
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
        soft, _ = resource.getrlimit(kind)
        if soft == resource.RLIM_INFINITY:
            return True
        try:
            resource.setrlimit(kind, (soft + 1, soft + 1))
        except ValueError:
            continue
        return True
    return False


@door
def become_root() -> object:
    os.setresuid(0, 0, 0)
    return os.access("/etc/shadow", os.R_OK)


@door
def link_out(folder: str, target: str) -> object:
    """A link in what may be written, to what may not."""
    link = os.path.join(folder, "link")
    with contextlib.suppress(FileExistsError):
        os.symlink(target, link)
    return write(link)


@door
def link(folder: str, target: str) -> object:
    os.symlink(target, os.path.join(folder, "planted"))
    return True


@door
def send_from_pair(path: str) -> object:
    """One of a pair of datagram sockets can be sent to others, too."""
    for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        one.sendto(b"x", path)
    return True


@door
def connect_from_pair(path: str) -> object:
    """One of a pair of streams is joined to another address, its own peer gone or not."""
    for is_alone in (False, True):
        first, second = socket.socketpair()
        if is_alone:
            second.close()
        with contextlib.suppress(OSError):
            first.connect(path)
            return True
    return False


@door
def take_cores() -> object:
    """More than one core, now or by asking."""
    if len(os.sched_getaffinity(0)) == 1:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return len(os.sched_getaffinity(0)) > 1


@door
def lower_limit() -> object:
    """That on core dumps to 0, which means something else than 1."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return True


@door
def pending_signals() -> object:
    """As many as the node's user may have."""
    return resource.getrlimit(resource.RLIMIT_SIGPENDING)[0] > 1024


@door
def print_much(size: int) -> object:
    block = b"x" * (1 << 16)
    for _ in range(size >> 16):
        os.write(2, block)
    return True


@door
def answer_much(size: int) -> object:
    """A reply of this size, in every pipe."""
    for pipe in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(pipe).st_mode):
                os.write(pipe, size.to_bytes(4, "big"))
                for _ in range(size >> 16):
                    os.write(pipe, bytes(1 << 16))
        except OSError:
            continue
    return True


@door
def spin() -> object:
    while True:
        pass


@door
def outlive(path: str) -> object:
    """Leave a process behind, in a session of its own, twice forked, that holds a file."""
    import fcntl

    lock = os.open(path, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            while True:
                time.sleep(3600)  # noqa: TID251 - until the kernel ends it
        os._exit(0)
    os.wait()
    os.close(lock)
    return True


class Spy:
    def knock(self, name: str, *arguments: Any) -> str:
        return attempt(name, list(arguments))


if __name__ == "__main__":
    serve(Spy())
