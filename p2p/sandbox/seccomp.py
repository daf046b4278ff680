"""The filter of system calls, assembled: a program of classic BPF that the kernel runs at each.

Theory of operation
-------------------
The program reads the call's number and arguments (``struct seccomp_data``) and returns a
verdict. What a table names is refused with an error, everything else allowed: a library meets
an error where it asks for what it must not have, and not the end of its process. A call in
another calling convention ends the process, because there every number means something else.

One instruction is eight bytes: code, how far to jump if true and if false, and a constant. Here
jumps only ever skip the next instruction or two, so there is nothing to resolve.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from p2p.sandbox.syscalls import (
    ALWAYS,
    ARCHITECTURES,
    CLONE,
    CLONE3,
    FORKS,
    IOCTL,
    PRLIMIT,
    SHARED,
    SOCKETPAIR,
    SOCKETS,
    UNCOUNTED,
    numbers_of,
)

LOAD: Final = 0x20
"""BPF_LD | BPF_W | BPF_ABS: a word of ``seccomp_data`` into the accumulator."""
EQUAL: Final = 0x15
"""BPF_JMP | BPF_JEQ | BPF_K."""
AT_LEAST: Final = 0x35
"""BPF_JMP | BPF_JGE | BPF_K."""
ANY_BIT: Final = 0x45
"""BPF_JMP | BPF_JSET | BPF_K."""
RETURN: Final = 0x06
"""BPF_RET | BPF_K."""

ALLOW: Final = 0x7FFF0000
KILL: Final = 0x80000000
"""The whole process."""
ERRNO: Final = 0x00050000
"""Return an error, whose number is in the lower half."""
EPERM: Final = 1
ENOSYS: Final = 38

NUMBER: Final = 0
"""Offsets in ``seccomp_data`` of the call's number, its architecture and the lower half of each
argument: both machines here are little-endian."""
ARCHITECTURE: Final = 4
FIRST: Final = 16
SECOND: Final = 24
THIRD: Final = 32
UPPER: Final = 4
"""From the lower half of an argument to the upper one."""

AUDIT: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's names for calling conventions (``linux/audit.h``)."""
X32: Final = 0x40000000
"""Numbers from here on are x32, a second convention of x86_64 under the same name."""
CLONE_THREAD: Final = 0x00010000
CLONE_NAMESPACES: Final = 0x7E020000
"""NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
UNIX: Final = 1
"""AF_UNIX."""
DATAGRAM: Final = 2
"""A bit of SOCK_DGRAM and SOCK_RAW, whose sockets send to any address, and not of SOCK_STREAM
and SOCK_SEQPACKET."""
TERMINAL_INPUT: Final = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: typing into a terminal that another program reads."""


class Instruction(NamedTuple):
    """One instruction (``struct sock_filter``)."""

    code: int
    if_true: int
    if_false: int
    constant: int


def deny(error: int) -> Instruction:
    """Return an error to the caller."""
    return _return(ERRNO | error)


def _return(verdict: int) -> Instruction:
    return Instruction(RETURN, 0, 0, verdict)


def _load(offset: int) -> Instruction:
    return Instruction(LOAD, 0, 0, offset)


def filter_program(
    machine: str, *, network: bool, forks: bool, uncounted: bool
) -> list[Instruction]:
    """The program for ``machine``, one of `ARCHITECTURES`.

    ``uncounted``: whether memory may be had that no address space shows, and what other
    programs have a share in.
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
    """Run ``block``, which returns, for this call alone."""
    return [Instruction(EQUAL, 0, len(block), number), *block]


def _judge_clone(*, forks: bool) -> list[Instruction]:
    """Threads of one's own process; processes if they are allowed; never a namespace."""
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
    """Pairs that stay joined. Of other families the kernel would load the module."""
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
    """Without new limits: the pointer to them is null."""
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
    """The bytes that the kernel takes, on a little-endian machine."""
    return b"".join(struct.pack("<HBBI", *one) for one in program)
