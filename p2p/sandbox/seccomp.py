"""The filter of system calls, assembled: a program of classic BPF that the kernel runs at each.

Theory of operation
-------------------
The program reads the call's number and arguments (``struct seccomp_data``) and returns a
verdict. What a table names is refused with an error, everything else allowed: a library meets
an error where it asks for what it must not have, and not the end of its process. A call in
another calling convention ends the process, because there every number means something else.

One instruction is eight bytes: code, how far to jump if true and if false, and a constant. Here
jumps only ever skip the next instruction or two, so there is nothing to resolve.

Numbers of calls are those of the kernel's own tables:
``arch/x86/entry/syscalls/syscall_64.tbl`` and, for aarch64,
``include/uapi/asm-generic/unistd.h``; from 424 on all architectures share them. None is a call
that the architecture does not have."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

ARCHITECTURES: Final = ("x86_64", "aarch64")
"""The supported architectures, in the order of the call numbers below."""

_Numbers = dict[str, tuple[int | None, int | None]]

OTHER_PROCESSES: Final[_Numbers] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
}
"""Calls that read or control other processes, in case one is ever visible."""

NAMESPACES: Final[_Numbers] = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
}
"""Calls that change the view of the machine. Root in a namespace of its own can reach most of
the kernel."""

KERNEL: Final[_Numbers] = {
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "create_module": (174, None),
    "query_module": (178, None),
    "get_kernel_syms": (177, None),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "vhangup": (153, 58),
    "syslog": (103, 116),
}
"""Calls into large or old parts of the kernel that have had bugs and that no library of ours
needs."""

MACHINE: Final[_Numbers] = {
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
"""Calls for root only. There is no root in the sandbox."""

LINKS: Final[_Numbers] = {
    "symlink": (88, None),
    "symlinkat": (266, 36),
}
"""Calls that make symbolic links. The node, which nothing confines, also opens files in the
worker's folder, and would follow a link to its key or out of its folder."""

ALWAYS: Final[_Numbers] = OTHER_PROCESSES | NAMESPACES | KERNEL | MACHINE | LINKS
"""Calls that are denied to every confined worker."""

UNCOUNTED: Final[_Numbers] = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
"""Calls that allocate memory outside any process's address space, and so beyond its limit."""

SHARED: Final[_Numbers] = {
    "io_setup": (206, 0),
    "sync": (162, 81),
    "syncfs": (306, 267),
    "sched_setaffinity": (203, 122),
    "setrlimit": (160, 164),
}
"""Calls on shared resources: asynchronous reads (65,536 places), write-back and cores. Setting
limits is among them, since a lower limit on core dumps has another meaning
(`p2p.sandbox.launch.NO_CORE`)."""

FORKS: Final[_Numbers] = {"fork": (57, None), "vfork": (58, None)}
"""Calls that make processes. ``clone`` makes threads too, and is judged by its flags."""

SOCKETS: Final[_Numbers] = {"socket": (41, 198)}
"""The call that makes sockets, except joined pairs (``SOCKETPAIR``), which event loops need."""

SOCKETPAIR: Final[_Numbers] = {"socketpair": (53, 199)}
PRLIMIT: Final[_Numbers] = {"prlimit64": (302, 261)}
"""The call ``prlimit`` reads limits, and sets them if it is given new ones."""
CLONE: Final[_Numbers] = {"clone": (56, 220)}
CLONE3: Final[_Numbers] = {"clone3": (435, 435)}
"""The call ``clone3`` has its flags in memory, where no filter can read them. If it seems to be
missing, the C library uses ``clone``."""
IOCTL: Final[_Numbers] = {"ioctl": (16, 29)}


def numbers_of(calls: _Numbers, machine: str) -> list[int]:
    """Return the call numbers of ``machine``, in the order of the table."""
    column = ARCHITECTURES.index(machine)
    return [number for row in calls.values() if (number := row[column]) is not None]


LOAD: Final = 0x20
"""BPF_LD | BPF_W | BPF_ABS: load a word of ``seccomp_data`` into the accumulator."""
EQUAL: Final = 0x15
"""BPF_JMP | BPF_JEQ | BPF_K: jump if the accumulator equals the constant."""
AT_LEAST: Final = 0x35
"""BPF_JMP | BPF_JGE | BPF_K: jump if the accumulator is at least the constant."""
ANY_BIT: Final = 0x45
"""BPF_JMP | BPF_JSET | BPF_K: jump if any bit of the constant is set."""
RETURN: Final = 0x06
"""BPF_RET | BPF_K: return the constant."""

ALLOW: Final = 0x7FFF0000
KILL: Final = 0x80000000
"""Verdict that ends the whole process."""
ERRNO: Final = 0x00050000
"""Verdict that returns an error, whose number is in the lower half."""
EPERM: Final = 1
ENOSYS: Final = 38

NUMBER: Final = 0
"""Offsets in ``seccomp_data`` of the call's number, its architecture and the lower half of each
argument. Both architectures here are little-endian."""
ARCHITECTURE: Final = 4
FIRST: Final = 16
SECOND: Final = 24
THIRD: Final = 32
UPPER: Final = 4
"""Offset from the lower half of an argument to the upper one."""

AUDIT: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's names for calling conventions (``linux/audit.h``)."""
X32: Final = 0x40000000
"""Lowest call number of x32, a second calling convention of x86_64 under the same name."""
CLONE_THREAD: Final = 0x00010000
CLONE_NAMESPACES: Final = 0x7E020000
"""Flags NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET of ``clone``."""
UNIX: Final = 1
"""Number of the address family AF_UNIX."""
DATAGRAM: Final = 2
"""Bit that SOCK_DGRAM and SOCK_RAW have, whose sockets send to any address, and SOCK_STREAM and
SOCK_SEQPACKET lack."""
TERMINAL_INPUT: Final = (0x5412, 0x541C)
"""The requests TIOCSTI and TIOCLINUX, which type into a terminal that another program reads."""


class Instruction(NamedTuple):
    """An instruction (``struct sock_filter``)."""

    code: int
    if_true: int
    if_false: int
    constant: int


def deny(error: int) -> Instruction:
    """Return an instruction that refuses the call with an error."""
    return _return(ERRNO | error)


def _return(verdict: int) -> Instruction:
    return Instruction(RETURN, 0, 0, verdict)


def _load(offset: int) -> Instruction:
    return Instruction(LOAD, 0, 0, offset)


def filter_program(
    machine: str, *, network: bool, forks: bool, uncounted: bool
) -> list[Instruction]:
    """Return the filter for ``machine``, one of `ARCHITECTURES`.

    With ``uncounted`` the worker may use memory that no address space shows, and resources that
    it shares with other programs.
    """
    if machine not in ARCHITECTURES:
        raise ValueError(f"no table of system calls for {machine!r}")
    program = [
        _load(ARCHITECTURE),
        Instruction(EQUAL, 1, 0, AUDIT[machine]),
        _return(KILL),
        _load(NUMBER),
    ]
    if machine == "x86_64":
        program += [Instruction(AT_LEAST, 0, 1, X32), _return(KILL)]
    denied = dict(ALWAYS)
    denied |= {} if network else SOCKETS
    denied |= {} if forks else FORKS
    denied |= {} if uncounted else UNCOUNTED | SHARED
    for number in numbers_of(denied, machine):
        program += _when(number, [deny(EPERM)])
    for number in numbers_of(CLONE3, machine):
        program += _when(number, [deny(ENOSYS)])
    for number in numbers_of(CLONE, machine):
        program += _when(number, _judge_clone(forks=forks))
    for number in numbers_of(IOCTL, machine):
        program += _when(number, _judge_ioctl())
    if not network:
        for number in numbers_of(SOCKETPAIR, machine):
            program += _when(number, _judge_socketpair())
    if not uncounted:
        for number in numbers_of(PRLIMIT, machine):
            program += _when(number, _judge_prlimit())
    return [*program, _return(ALLOW)]


def _when(number: int, block: Sequence[Instruction]) -> list[Instruction]:
    """Return instructions that run ``block``, which ends in a verdict, for this call alone."""
    return [Instruction(EQUAL, 0, len(block), number), *block]


def _judge_clone(*, forks: bool) -> list[Instruction]:
    """Allow threads of the same process, processes if ``forks`` is True, and never a
    namespace."""
    wanted = [] if forks else [Instruction(ANY_BIT, 1, 0, CLONE_THREAD), deny(EPERM)]
    namespaces = [Instruction(ANY_BIT, 0, 1, CLONE_NAMESPACES), deny(EPERM)]
    return [_load(FIRST), *wanted, *namespaces, _return(ALLOW)]


def _judge_ioctl() -> list[Instruction]:
    typing = [
        one
        for request in TERMINAL_INPUT
        for one in (Instruction(EQUAL, 0, 1, request), deny(EPERM))
    ]
    return [_load(SECOND), *typing, _return(ALLOW)]


def _judge_socketpair() -> list[Instruction]:
    """Allow joined Unix pairs only. For other families the kernel would load the module."""
    return [
        _load(FIRST),
        Instruction(EQUAL, 1, 0, UNIX),
        deny(EPERM),
        _load(SECOND),
        Instruction(ANY_BIT, 0, 1, DATAGRAM),
        deny(EPERM),
        _return(ALLOW),
    ]


def _judge_prlimit() -> list[Instruction]:
    """Allow the call only if it sets no new limits, so that the pointer to them is null."""
    return [
        _load(THIRD),
        Instruction(EQUAL, 1, 0, 0),
        deny(EPERM),
        _load(THIRD + UPPER),
        Instruction(EQUAL, 1, 0, 0),
        deny(EPERM),
        _return(ALLOW),
    ]


def assemble(program: Sequence[Instruction]) -> bytes:
    """Return the bytes that the kernel takes, on a little-endian machine."""
    return b"".join(struct.pack("<HBBI", *one) for one in program)
