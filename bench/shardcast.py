"""One file to several machines, by Shoal and by what else there is, by turns over loopback.

==================  ========================================================================
``shoal``           ``shoal push --expect N`` and N ``shoal pull``, as processes
``shoal serve``     our HTTP edge and N curl
``shardcast``       PyPI's shardcast 0.3.2: its origin and N of its clients, which need wget
``nginx``           nginx and N curl
``libtorrent``      a seed and N leechers, full mesh, one v1 torrent; ``--torrent-python`` names
                    an interpreter that has libtorrent
==================  ========================================================================

What is not installed is named and left out. "seconds" is from the first process's start until
the last receiver has the file whole; "CPU s/GB" is of all processes from start to end, for each
GB that a receiver got. Over loopback no line is slow, so both say what the programs cost, and a
star of curls wins. Where the origin's line is what counts it loses by the number of receivers:
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from bench.report import Report
from bench.store import write_weights
from p2p.wire import MIB

GB: Final = 1e9
PATIENCE: Final = 120.0
"""Seconds for a process to say something, on a busy machine."""
LOCAL: Final = "127.0.0.1"
_CAST: Final = "import sys; from p2p import cast; sys.exit(cast.{}(sys.argv[1:]))"
_ORIGIN: Final = """
import pathlib, sys
from shardcast.origin_server import OriginServer
folder, port, weights = sys.argv[1:]
origin = OriginServer(folder, int(port))
pathlib.Path(folder, "data1.bin").write_bytes(bytes(1000))  # its clients want one
origin.broadcast(weights)
print("up", flush=True)
sys.stdin.read()
import os; os._exit(0)  # its server's thread ends with no word
"""
_CLIENT: Final = """
import fcntl, sys
from shardcast import client
from shardcast.client_node import ClientNode
url, folder, lock = sys.argv[1:]
def in_turn(function):  # two scratch files are shared by all its clients on a machine
    def call(*arguments):
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return function(*arguments)
    return call
for name in ("_init_server_metrics", "download_distribution_file"):
    setattr(client.ShardDownloader, name, in_turn(getattr(client.ShardDownloader, name)))
assert ClientNode([url], folder).download_version("v1", folder + "/weights")
print("whole", flush=True)
sys.stdin.read()
"""
_TORRENT: Final = """
import sys, time
import libtorrent as lt
role, folder, torrent, port, *others = sys.argv[1:]
if role == "seed":
    files = lt.file_storage()
    lt.add_files(files, folder + "/weights")
    made = lt.create_torrent(files, flags=lt.create_torrent.v1_only)
    lt.set_piece_hashes(made, folder)
    open(torrent, "wb").write(lt.bencode(made.generate()))
session = lt.session({
    "listen_interfaces": "127.0.0.1:" + port, "enable_dht": False, "enable_lsd": False,
    "enable_upnp": False, "enable_natpmp": False, "allow_multiple_connections_per_ip": True,
    "alert_mask": 0,
})
handle = session.add_torrent({"ti": lt.torrent_info(torrent), "save_path": folder})
while not handle.status().is_seeding:
    for other in others if handle.status().num_peers < len(others) else ():
        handle.connect_peer(("127.0.0.1", int(other)))
    time.sleep(0.05)
print("up" if role == "seed" else "whole", flush=True)
sys.stdin.read()
"""


class Program:
    """A process that says lines, and ends when its standard input does."""

    def __init__(self, *line: object) -> None:
        self.cpu = 0.0
        """CPU seconds of it and of what it started, once it has ended."""
        self._process = subprocess.Popen(
            [str(word) for word in line],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def said(self, word: str) -> str:
        """The next line that has ``word`` in it. Raises `EOFError` if there is none in time."""
        assert self._process.stdout is not None
        timer = threading.Timer(PATIENCE, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if word in line:
                    return line
        finally:
            timer.cancel()
        raise EOFError(f"{self._process.args!r:.200} ended without saying {word!r}")

    def end(self, *, ask: bool = True) -> None:
        """Let it end, by end of file or, without ``ask``, by a signal; wait for that."""
        if self._process.returncode is not None:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        if not ask:
            os.kill(self._process.pid, signal.SIGTERM)  # it may be over: wait4 has its figures
        _, status, used = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self.cpu = used.ru_utime + used.ru_stime


class Course:
    """One system's turn: its processes, begun one by one."""

    def __init__(self, folder: Path, weights: Path, receivers: int) -> None:
        self.folder, self.weights, self.receivers = folder, weights, receivers
        self._programs: list[Program] = []

    def start(self, *line: object) -> Program:
        """A process that is counted."""
        program = Program(*line)
        self._programs.append(program)
        return program

    def python(self, code: str, *arguments: object) -> Program:
        """One of Python's."""
        return self.start(sys.executable, "-c", code, *arguments)

    def out(self, number: int) -> Path:
        """The folder of one receiver."""
        path = self.folder / f"out{number}"
        path.mkdir()
        return path

    @contextmanager
    def ending(self, *, ask: bool = True) -> Iterator[None]:
        """End all processes, the last first, when the block does."""
        try:
            yield
        finally:
            for program in reversed(self._programs):
                program.end(ask=ask)

    @property
    def cpu(self) -> float:
        """CPU seconds of all."""
        return sum(program.cpu for program in self._programs)


def shoal(course: Course) -> float:
    """Push and pull; the seconds until all have it."""
    began = time.perf_counter()
    common = ("--listen", f"/ip4/{LOCAL}/tcp/0", "--json")
    state = course.folder / "pusher"
    with course.ending(ask=False):
        push = course.python(
            _CAST.format("push"), course.weights, "--data", state, *common,
            "--expect", course.receivers,
        )  # fmt: skip
        ticket = json.loads(push.said('"ticket"'))["ticket"]
        pulls = [
            course.python(_CAST.format("pull"), ticket, "--out", course.out(n), *common)
            for n in range(course.receivers)
        ]
        for pull in pulls:
            pull.said('"whole"')
        return time.perf_counter() - began


def _curls(course: Course, url: str, began: float) -> float:
    curls = [
        course.start("curl", "-sf", url, "-o", course.out(n) / "weights", "-w", "whole\\n")
        for n in range(course.receivers)
    ]
    for curl in curls:
        curl.said("whole")
    return time.perf_counter() - began


def shoal_serve(course: Course) -> float:
    """Our HTTP edge and curls."""
    began = time.perf_counter()
    os.environ["XDG_STATE_HOME"] = str(course.folder / "state")
    try:
        with course.ending(ask=False):
            serve = course.python(
                _CAST.format("serve"), course.weights, "--http", f"{LOCAL}:0", "--json"
            )
            [url] = json.loads(serve.said('"http"'))["urls"]
            return _curls(course, f"{url}v/0/raw", began)
    finally:
        del os.environ["XDG_STATE_HOME"]


def shardcast(course: Course) -> float:
    """PyPI's shardcast: every client takes from the origin, without middle nodes."""
    began, port = time.perf_counter(), _free_port()
    with course.ending():
        course.python(_ORIGIN, course.folder / "origin", port, course.weights).said("up")
        clients = [
            course.python(
                _CLIENT, f"http://{LOCAL}:{port}", course.out(n), course.folder / "lock"
            )
            for n in range(course.receivers)
        ]
        for client in clients:
            client.said("whole")
        return time.perf_counter() - began


def nginx(course: Course) -> float:
    """nginx and curls."""
    began, port = time.perf_counter(), _free_port()
    settings = course.folder / "nginx.conf"
    settings.write_text(
        f"pid {course.folder}/pid; error_log /dev/null; events {{}} daemon off;"
        f" http {{ access_log off; sendfile on; server {{ listen {LOCAL}:{port};"
        f" root {course.weights.parent}; }} }}\n"
    )
    with course.ending(ask=False):
        course.start("nginx", "-c", settings, "-p", course.folder)
        while True:
            with socket.socket() as trial:
                if trial.connect_ex((LOCAL, port)) == 0:
                    break
        return _curls(course, f"http://{LOCAL}:{port}/{course.weights.name}", began)


def torrent(course: Course, python: str) -> float:
    """libtorrent: a seed and leechers that all know each other."""
    began = time.perf_counter()
    ports = [_free_port() for _ in range(course.receivers + 1)]
    made = course.folder / "weights.torrent"
    with course.ending():
        line = python, "-c", _TORRENT
        course.start(*line, "seed", course.weights.parent, made, ports[0]).said("up")
        leechers = [
            course.start(*line, "leech", course.out(n), made, ports[n + 1], *ports[: n + 1])
            for n in range(course.receivers)
        ]
        for leecher in leechers:
            leecher.said("whole")
        return time.perf_counter() - began


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind((LOCAL, 0))
        port: int = taken.getsockname()[1]
        return port


def _subjects(torrent_python: str) -> dict[str, Callable[[Course], float]]:
    """Those that can be run here; what is missing is named."""
    has_torrent = [torrent_python, "-c", "import libtorrent"]
    is_there = {
        "shoal": "",
        "shoal serve": "" if shutil.which("curl") else "curl is not installed",
        "shardcast": (
            "" if find_spec("shardcast") and shutil.which("wget")
            else "the package shardcast, or wget, is not installed"
        ),
        "nginx": "" if shutil.which("nginx") and shutil.which("curl") else "not installed",
        "libtorrent": (
            "" if subprocess.run(has_torrent, capture_output=True, check=False).returncode == 0
            else f"{torrent_python} has no module libtorrent; see --torrent-python"
        ),
    }  # fmt: skip
    known: dict[str, Callable[[Course], float]] = {
        "shoal": shoal,
        "shoal serve": shoal_serve,
        "shardcast": shardcast,
        "nginx": nginx,
        "libtorrent": lambda course: torrent(course, torrent_python),
    }
    for name, why_not in is_there.items():
        if why_not:
            print(f"{name} is left out: {why_not}")
    return {name: play for name, play in known.items() if not is_there[name]}


def run(argv: Sequence[str]) -> int:
    """Print and write the figures; 1 if Shoal costs more CPU than libtorrent, where that is."""
    parser = argparse.ArgumentParser(prog="python -m bench shardcast", description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--torrent-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    subjects = _subjects(options.torrent_python)
    found: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (base / "source").mkdir()
        weights = base / "source" / "weights"
        write_weights(weights, options.mib * MIB)
        delivered = weights.stat().st_size * options.receivers / GB
        for _ in range(options.rounds):
            for name, play in subjects.items():
                with tempfile.TemporaryDirectory(dir=base) as folder:
                    course = Course(Path(folder), weights, options.receivers)
                    seconds = play(course)
                found.setdefault((name, "seconds"), []).append(seconds)
                found.setdefault((name, "CPU s/GB"), []).append(course.cpu / delivered)
    report = Report("shardcast")
    case = f"{options.mib} MiB to {options.receivers}"
    for (name, metric), values in found.items():
        report.add(case, name, metric, "", values)
    costs: dict[str, Any] = {
        name: report.compare(case, "CPU s/GB", "shoal", name)
        for name in subjects
        if name != "shoal"
    }
    for name in costs:
        report.compare(case, "seconds", "shoal", name)
    print(report)
    report.write(options.json)
    return int(costs.get("libtorrent", 0.0) > 1)
