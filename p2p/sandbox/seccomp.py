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


def _calls(rows: str) -> _Numbers:
    """Read rows of a name and its two numbers; "-" stands for a call that is missing."""
    found: _Numbers = {}
    for row in rows.split(","):
        name, *numbers = row.split()
        first, second = (None if number == "-" else int(number) for number in numbers)
        found[name] = first, second
    return found


ALWAYS: Final = _calls(
    """
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271,
    process_madvise 440 440, pidfd_getfd 438 438, kcmp 312 272, unshare 272 97, setns 308 268,
    mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428,
    move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433,
    mount_setattr 442 442, open_tree_attr 467 467, mknod 133 -, mknodat 259 33,
    name_to_handle_at 303 264, open_by_handle_at 304 265, bpf 321 280,
    perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425,
    io_uring_enter 426 426, io_uring_register 427 427, add_key 248 217, request_key 249 218,
    keyctl 250 219, kexec_load 246 104, kexec_file_load 320 294, init_module 175 105,
    finit_module 313 273, delete_module 176 106, create_module 174 -, query_module 178 -,
    get_kernel_syms 177 -, personality 135 92, modify_ldt 154 -, iopl 172 -, ioperm 173 -,
    uselib 134 -, ustat 136 -, sysfs 139 -, _sysctl 156 -, lookup_dcookie 212 18,
    nfsservctl 180 42, fanotify_init 300 262, fanotify_mark 301 263, vhangup 153 58,
    syslog 103 116, reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89,
    quotactl 179 60, quotactl_fd 443 443, settimeofday 164 170, clock_settime 227 112,
    adjtimex 159 171, clock_adjtime 305 266, sethostname 170 161, setdomainname 171 162,
    symlink 88 -, symlinkat 266 36
    """
)
"""Calls that are denied to every confined worker, in this order: those that read or control
other processes, in case one is ever visible; that change the view of the machine, since root in
a namespace of its own can reach most of the kernel; that reach large or old parts of the kernel
that have had bugs and that no library of ours needs; that are for root, whom the sandbox lacks;
and that make symbolic links, because the node, which nothing confines, also opens files in the
worker's folder and would follow a link to its key."""
UNCOUNTED: Final = _calls(
    """
    memfd_create 319 279, memfd_secret 447 447, shmget 29 194, msgget 68 186, semget 64 190,
    mq_open 240 180,
    io_setup 206 0, sync 162 81, syncfs 306 267, sched_setaffinity 203 122, setrlimit 160 164
    """
)
"""Calls that allocate memory outside any process's address space, and so beyond its limit; and
calls on shared resources: asynchronous reads (65,536 places), write-back and cores. Setting
limits is among them, since a lower limit on core dumps has another meaning
(`p2p.sandbox.launch`)."""


def numbers_of(calls: _Numbers, machine: str) -> list[int]:
    """Return the call numbers of ``machine``, in the order of the table."""
    column = ARCHITECTURES.index(machine)
    return [number for row in calls.values() if (number := row[column]) is not None]


EQUAL: Final = 0x15
"""BPF_JMP | BPF_JEQ | BPF_K: jump if the accumulator equals the constant."""
ANY_BIT: Final = 0x45
"""BPF_JMP | BPF_JSET | BPF_K: jump if any bit of the constant is set."""
ALLOW: Final = 0x7FFF0000
KILL: Final = 0x80000000
"""Verdict that ends the whole process."""
FIRST, SECOND, THIRD = 16, 24, 32
"""Offsets in ``seccomp_data`` of the lower half of each argument. Both architectures here are
little-endian."""
AUDIT: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's names for calling conventions (``linux/audit.h``)."""


class Instruction(NamedTuple):
    """An instruction (``struct sock_filter``)."""

    code: int
    if_true: int
    if_false: int
    constant: int


def deny(error: int = 1) -> Instruction:
    """Return an instruction that refuses the call with an error, by default EPERM."""
    return _return(0x00050000 | error)  # SECCOMP_RET_ERRNO


def _return(verdict: int) -> Instruction:
    return Instruction(0x06, 0, 0, verdict)  # BPF_RET | BPF_K


def _load(offset: int) -> Instruction:
    """BPF_LD | BPF_W | BPF_ABS: load a word of ``seccomp_data`` into the accumulator."""
    return Instruction(0x20, 0, 0, offset)


def filter_program(
    machine: str, *, network: bool, forks: bool, uncounted: bool
) -> list[Instruction]:
    """Return the filter for ``machine``, one of `ARCHITECTURES`.

    With ``uncounted`` the worker may use memory that no address space shows, and resources that
    it shares with other programs.
    """
    if machine not in ARCHITECTURES:
        raise ValueError(f"no table of system calls for {machine!r}")
    # Offset 4 has the calling convention, offset 0 the call's number.
    program = [_load(4), Instruction(EQUAL, 1, 0, AUDIT[machine]), _return(KILL), _load(0)]
    if machine == "x86_64":
        # From 0x40000000 on (BPF_JMP | BPF_JGE) calls are x32's, under the same name.
        program += [Instruction(0x35, 0, 1, 0x40000000), _return(KILL)]
    denied = dict(ALWAYS)
    # Joined pairs of sockets, which event loops need, and ``clone``, which makes threads too,
    # are judged below.
    denied |= {} if network else _calls("socket 41 198")
    denied |= {} if forks else _calls("fork 57 -, vfork 58 -")
    denied |= {} if uncounted else UNCOUNTED
    for number in numbers_of(denied, machine):
        program += [Instruction(EQUAL, 0, 1, number), deny()]
    for call, block in _judgements(network=network, forks=forks, uncounted=uncounted).items():
        (number,) = numbers_of(_calls(call), machine)
        program += [Instruction(EQUAL, 0, len(block), number), *block]
    return [*program, _return(ALLOW)]


def _judgements(*, network: bool, forks: bool, uncounted: bool) -> dict[str, list[Instruction]]:
    """Return the instructions that judge calls by their arguments, for each row as in
    `ALWAYS`; every block ends in a verdict."""
    is_thread = [] if forks else [Instruction(ANY_BIT, 1, 0, 0x00010000), deny()]
    blocks = {
        # Its flags are in memory, where no filter can read them. If it seems to be missing
        # (ENOSYS), the C library uses ``clone``.
        "clone3 435 435": [deny(38)],
        # Threads (CLONE_THREAD), processes if allowed, and never a namespace: NEWNS,
        # NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
        "clone 56 220": [
            *(_load(FIRST), *is_thread, Instruction(ANY_BIT, 0, 1, 0x7E020000), deny()),
            _return(ALLOW),
        ],
        # TIOCSTI and TIOCLINUX type into a terminal that another program reads.
        "ioctl 16 29": [
            *(_load(SECOND), Instruction(EQUAL, 0, 1, 0x5412), deny()),
            *(Instruction(EQUAL, 0, 1, 0x541C), deny(), _return(ALLOW)),
        ],
    }
    if not network:
        # Joined pairs of AF_UNIX (1) only: for other families the kernel would load the
        # module. Sockets of types with bit 2, SOCK_DGRAM and SOCK_RAW, send to any address.
        blocks["socketpair 53 199"] = [
            *(_load(FIRST), Instruction(EQUAL, 1, 0, 1), deny()),
            *(_load(SECOND), Instruction(ANY_BIT, 0, 1, 2), deny(), _return(ALLOW)),
        ]
    if not uncounted:
        # The call reads limits, and sets them unless both halves of the pointer are null.
        blocks["prlimit64 302 261"] = [
            *(_load(THIRD), Instruction(EQUAL, 1, 0, 0), deny()),
            *(_load(THIRD + 4), Instruction(EQUAL, 1, 0, 0), deny(), _return(ALLOW)),
        ]
    return blocks


def assemble(program: Sequence[Instruction]) -> bytes:
    """Return the bytes that the kernel takes, on a little-endian machine."""
    return b"".join(struct.pack("<HBBI", *one) for one in program)
