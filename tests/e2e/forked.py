"""Command lines of ``shoal`` in forked processes, which need not import everything again.

Each ends as a user's process does: what is left in its streams is flushed. None finds the nodes
that this user happens to run on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).parent.parent.parent
COMMANDS: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "entry-points"
]["shoal.commands"]
DRIVER: Final = """
import gc, json, os, pwd, shutil, sys, traceback
from functools import partial
from pathlib import Path
from p2p.node import folders
from p2p.node.commands import command_names, load_command, main
for name in command_names():
    load_command(name)
import roles.demo.command
folders._SOCKETS = Path(os.devnull)


def ended(command):
    # as Python ends, but for taking its modules apart
    try:
        code = command()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            code = 120
            print("Exception ignored:", error, file=sys.stderr)
    return code


gc.collect()
gc.freeze()
results = os.fdopen(int(sys.argv[1]), "w")
for line in sys.stdin:
    case = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(case["folder"])
        for number, where in ((1, case["out"]), (2, case["err"])):
            stream = "stdout" if number == 1 else "stderr"
            if where == "closed":
                os.close(number)
                setattr(sys, stream, None)
            elif where == "unread":
                read, write = os.pipe()
                os.close(read)
                os.dup2(write, number)
            else:
                os.dup2(os.open(where, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            if where != "closed":
                old = getattr(sys, stream)
                new = open(number, "w", encoding=old.encoding, errors=old.errors, closefd=False)
                setattr(sys, stream, new)
                setattr(sys, f"__{stream}__", new)
        for name, value in case["env"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if "HOME" in case["env"]:
            def nobody(number):
                raise KeyError(number)
            pwd.getpwuid = nobody
        if case["gone"]:
            shutil.rmtree(case["folder"])
        os._exit(ended(partial(main, [os.fsdecode(one.encode()) for one in case["arguments"]])))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    results.write(f"{code}\\n")
    results.flush()
"""


@dataclass(frozen=True)
class Surroundings:
    """What a command finds around it."""

    out: str = ""
    """``closed``, ``unread`` (a pipe whose reader has gone), or a path; else a file."""
    err: str = ""
    env: Mapping[str, str | None] | None = None
    """Without HOME there is no entry in passwd, either."""
    is_gone: bool = False  # whether the working directory has been removed


class Forks:
    """Starts commands in one locale."""

    def __init__(self, process: subprocess.Popen[str], results: IO[str]) -> None:
        self._process = process
        self._results = results

    def run(
        self, arguments: Sequence[str], folder: Path, around: Surroundings
    ) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        folder.mkdir(exist_ok=True, parents=True)
        out, err = folder.parent / "out", folder.parent / "err"
        case: dict[str, Any] = {
            "arguments": list(arguments),
            "folder": str(folder),
            "out": around.out or str(out),
            "err": around.err or str(err),
            "env": dict(around.env or {}),
            "gone": around.is_gone,
        }
        for path in (out, err):
            path.unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        code = int(self._results.readline())
        said = [p.read_text(errors="replace") if p.exists() else "" for p in (out, err)]
        return code, said[0], said[1]


@contextmanager
def forks(env: Mapping[str, str] | None = None) -> Iterator[Forks]:
    """Commands with ``env`` besides this process's."""
    read, write = os.pipe()
    with (
        os.fdopen(read) as results,
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(write)], stdin=subprocess.PIPE, text=True,
            pass_fds=[write], env={**os.environ, "COLUMNS": "80", **(env or {})},
        ) as process,
    ):  # fmt: skip
        os.close(write)
        yield Forks(process, results)
