"""The filter of system calls: what its program says of each, and what the kernel does."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys

import pytest

from p2p.sandbox.entry import READY, EntryLimits
from p2p.sandbox.launch import is_filtered, machine_name
from p2p.sandbox.seccomp import (
    ALLOW,
    ALWAYS,
    ARCHITECTURES,
    AUDIT,
    KILL,
    UNCOUNTED,
    Instruction,
    assemble,
    filter_program,
    numbers_of,
)

EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
THREAD = 0x003D0F00
"""What glibc asks for: VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS and the rest."""
HARMLESS = {
    "x86_64": (0, 1, 3, 9, 39, 59, 202, 228),
    "aarch64": (63, 64, 57, 222, 172, 221, 98),
}
"""read, write, close, mmap, getpid, execve, futex, clock_gettime."""


def judge(
    program: list[Instruction], machine: str, number: int, *arguments: int, audit: int = 0
) -> int:
    """What the kernel's interpreter makes of one call."""
    words = [*arguments, *(6 - len(arguments)) * [0]]
    data = struct.pack("<IIQ6Q", number, audit or AUDIT[machine], 0, *words)
    place, value = 0, 0
    while True:
        code, if_true, if_false, constant = program[place]
        place += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, constant)
            case 0x06:
                return constant
            case 0x15:
                place += if_true if value == constant else if_false
            case 0x35:
                place += if_true if value >= constant else if_false
            case 0x45:
                place += if_true if value & constant else if_false
            case _:
                pytest.fail(f"no such instruction: {code:#x}")


def program_for(machine: str, **allowed: bool) -> list[Instruction]:
    given = {"network": False, "forks": False, "uncounted": False, **allowed}
    return filter_program(machine, **given)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_tables_name_is_denied_and_nothing_else(machine: str) -> None:
    program = program_for(machine)
    asked = {"x86_64": {41, 57, 58}, "aarch64": {198}}[machine]  # socket, fork, vfork
    named = asked.union(numbers_of(ALWAYS | UNCOUNTED, machine))
    special = {"x86_64": {53, 56, 435}, "aarch64": {199, 220, 435}}[machine]
    for number in range(512):
        if number in special:
            continue
        wanted = EPERM if number in named else ALLOW
        assert judge(program, machine, number) == wanted, number
    assert not named & set(HARMLESS[machine])


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_threads_may_be_made_and_processes_if_they_are_allowed(machine: str) -> None:
    clone = {"x86_64": 56, "aarch64": 220}[machine]
    strict, forking = program_for(machine), program_for(machine, forks=True)
    for program in (strict, forking):
        assert judge(program, machine, clone, THREAD) == ALLOW
        for namespace in (0x20000, *(1 << bit for bit in range(25, 31))):
            assert judge(program, machine, clone, namespace | THREAD) == EPERM
            assert judge(program, machine, clone, namespace | 17) == EPERM
        assert judge(program, machine, 435) == ENOSYS, "clone3 hides its flags"
    assert judge(strict, machine, clone, 17) == EPERM  # SIGCHLD: a fork
    assert judge(strict, machine, clone, 0x4111) == EPERM  # a vfork
    assert judge(forking, machine, clone, 17) == ALLOW


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_only_streams_of_one_machine_may_be_joined(machine: str) -> None:
    pair = {"x86_64": 53, "aarch64": 199}[machine]
    strict, network = program_for(machine), program_for(machine, network=True)
    flags = 0o4000 | 0o2000000  # not blocking, closed at exec
    for kind, verdict in ((1, ALLOW), (5, ALLOW), (2, EPERM), (3, EPERM)):
        for asked in (kind, kind | flags):
            assert judge(strict, machine, pair, 1, asked) == verdict
            assert judge(network, machine, pair, 1, asked) == ALLOW
    for family in (0, 2, 10, 16, 17, 30, 40):
        assert judge(strict, machine, pair, family, 1) == EPERM


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_limits_may_be_read_and_not_set(machine: str) -> None:
    limit, engine = {"x86_64": 302, "aarch64": 261}[machine], dict.fromkeys(["uncounted"], True)
    for program, verdict in (
        (program_for(machine), EPERM),
        (program_for(machine, **engine), ALLOW),
    ):
        for new in (1, 1 << 32, (1 << 47) - 16):
            assert judge(program, machine, limit, 0, 4, new) == verdict
        assert judge(program, machine, limit, 0, 4, 0, 1 << 40) == ALLOW


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_another_calling_convention_ends_the_process(machine: str) -> None:
    program = program_for(machine, network=True, forks=True, uncounted=True)
    other = {"x86_64": AUDIT["aarch64"], "aarch64": AUDIT["x86_64"]}[machine]
    assert judge(program, machine, 0, audit=other) == KILL
    assert judge(program, machine, 0, audit=0x40000003) == KILL, "of 32 bits"
    if machine == "x86_64":
        assert judge(program, machine, 0x40000000 + 101) == KILL, "x32 has a ptrace, too"


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_program_is_what_the_kernel_takes(machine: str) -> None:
    program = program_for(machine)
    assert len(program) < 4096, "BPF_MAXINSNS"
    for place, one in enumerate(program):
        assert place + 1 + max(one.if_true, one.if_false) < len(program) or one.code == 0x06
    assert len(assemble(program)) == 8 * len(program)
    assert struct.unpack_from("<HBBI", assemble(program)) == (0x20, 0, 0, 4)


def test_numbers_are_the_kernels_own() -> None:
    """Those of which Python or libc knows the name can be compared with this machine's."""
    if machine_name() != "x86_64":
        pytest.skip("the headers here are of another machine")
    header = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"
    if not os.path.exists(header):
        pytest.skip("no headers of the kernel are installed")
    with open(header, encoding="ascii") as file:
        words = [line.split() for line in file if line.startswith("#define __NR_")]
    known = {name.removeprefix("__NR_"): int(number) for _, name, number in words}
    for name, (number, _) in (ALWAYS | UNCOUNTED).items():
        if number is not None and name in known:
            assert known[name] == number, name


LIVE = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace(0, 0, None, None)
print(ctypes.get_errno())
libc.unshare(0x10000000)
print(ctypes.get_errno())
pair = socket.socketpair()
try:
    socket.socket()
except OSError as error:
    print(error.errno)
try:
    os.fork()
except OSError as error:
    print(error.errno)
print(open("/proc/self/status").read().split("NoNewPrivs:")[1].split()[0])
"""


@pytest.mark.skipif(not is_filtered(), reason="no filter for this machine")
def test_the_kernel_denies_what_the_program_says(tmp_path: object) -> None:
    """Without any sandbox around it: a process does it to itself."""
    (tmp_path / "live.py").write_text(LIVE)  # type: ignore[operator]
    limits = EntryLimits(amounts={"CORE": 0}, machine=machine_name())
    done = subprocess.run(
        [sys.executable, "-m", "p2p.sandbox.entry", limits.to_argument(), "live"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        check=True,
    )
    assert done.stdout.startswith(READY)
    denied = str(errno.EPERM).encode()
    assert done.stdout.removeprefix(READY).split() == [*4 * [denied], b"1"]


def test_limits_cross_the_command_line() -> None:
    limits = EntryLimits(amounts={"AS": 1 << 31, "NPROC": 64}, user=1 << 30, machine="x86_64")
    assert EntryLimits(**json.loads(limits.to_argument())) == limits
