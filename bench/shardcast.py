"""One file to several machines, by Shoal and by other systems, in turns.

==================  ========================================================================
``shoal``           ``shoal push --expect N`` and N ``shoal pull``, as processes
``shoal serve``     our HTTP edge and N curl
``shardcast``       PyPI's shardcast 0.3.2: its origin and N of its clients, which need wget;
                    with ``--mbit``, four of its middle nodes on lines of their own as well
``nginx``           nginx and N curl
``libtorrent``      a seed and N leechers, full mesh, one v1 torrent; ``--torrent-python`` names
                    an interpreter that has libtorrent
==================  ========================================================================

What is not installed is named and left out.

Over loopback no line is slow, so "seconds", from the first process's start until the last
receiver has the file whole, and "CPU s/GB", of all processes for each GB that a receiver got,
say what the programs cost; a star of curls wins.

With ``--mbit`` each machine has a line of its own, of so many Mbit/s up and down, and frames
take half of ``--rtt`` from one to the other (`sim.studies.lab.switch`; Linux, as root).
"seconds" begins when all processes are up, and the origin has the file but may not give it yet;
"origin sent" is in copies, headers included.
"""

from __future__ import annotations

import argparse
import compileall
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
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import trio

from bench.report import Report
from bench.store import write_weights
from p2p.wire import MIB
from sim.net.link import LinkSpec
from sim.studies.lab.machines import EmulationConfig, open_emulation
from sim.studies.lab.namespaces import environment

ROOT: Final = Path(__file__).parent.parent
GB: Final = 1e9
PATIENCE: Final = 120.0
"""Seconds for a process to say something, on a busy machine."""
LOCAL: Final = "127.0.0.1"
_CAST: Final = "import sys; from p2p import cast; sys.exit(cast.{}(sys.argv[1:]))"
RELAYS: Final = 4
"""Middle nodes of shardcast where there are lines: half as many as receivers, each a machine
that none of the others needs."""
SHARD_BYTES: Final = 4_000_000
"""Bytes of a shard of shardcast on lines, the best found. Its own 50 MB, of which a middle node
gives none before it has the whole, took 1.3 times as long."""
_ORIGIN: Final = """
import pathlib, sys
from shardcast.origin_server import OriginServer
folder, port, weights = sys.argv[1:]
origin = OriginServer(folder, int(port))
pathlib.Path(folder, "data1.bin").write_bytes(bytes(1000))  # its clients want one
print("up", flush=True)
sys.stdin.readline()
origin.broadcast(weights)
sys.stdin.read()
import os; os._exit(0)  # its server's thread ends with no word
"""
_IN_TURN: Final = """
import fcntl, sys
from shardcast import client
def in_turn(function):  # two scratch files are shared by all its clients on a machine
    def call(*arguments):
        with open(sys.argv[1], "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return function(*arguments)
    return call
for name in ("_init_server_metrics", "download_distribution_file"):
    setattr(client.ShardDownloader, name, in_turn(getattr(client.ShardDownloader, name)))
"""
_MIDDLE: Final = (
    _IN_TURN
    + """
import os, pathlib
from shardcast.middle_node import MiddleNode
_, _, upstream, folder, port = sys.argv
pathlib.Path(folder).mkdir()
pathlib.Path(folder, "data1.bin").write_bytes(bytes(1000))
MiddleNode([upstream], folder, int(port), check_interval=1)
print("up", flush=True)
sys.stdin.read()
os._exit(0)
"""
)
_CLIENT: Final = (
    _IN_TURN
    + """
import time, urllib.error, urllib.request
from shardcast.client_node import ClientNode
_, _, urls, folder = sys.argv
node = ClientNode(urls.split(","), folder)
print("up", flush=True)
def lists(url):
    try:
        return b"v1" in urllib.request.urlopen(url + "/distribution.txt").read()
    except urllib.error.HTTPError:
        return False
# A client that is told of v1 by one server and not by the next asks for 10 shards, for ever.
while not all(map(lists, urls.split(","))):
    time.sleep(0.2)
assert node.download_version("v1", folder + "/weights")
print("whole", flush=True)
sys.stdin.read()
"""
)
_TORRENT: Final = """
import sys, time
import libtorrent as lt
role, folder, torrent, host, port, *others = sys.argv[1:]
if role == "seed":
    files = lt.file_storage()
    lt.add_files(files, folder + "/weights")
    made = lt.create_torrent(files, flags=lt.create_torrent.v1_only)
    lt.set_piece_hashes(made, folder)
    open(torrent, "wb").write(lt.bencode(made.generate()))
session = lt.session({
    "listen_interfaces": host + ":" + port, "enable_dht": False, "enable_lsd": False,
    "enable_upnp": False, "enable_natpmp": False, "allow_multiple_connections_per_ip": True,
    "alert_mask": 0,
})
handle = session.add_torrent({"ti": lt.torrent_info(torrent), "save_path": folder})
print("begun", flush=True)
while not handle.status().is_seeding:
    for other in others if handle.status().num_peers < len(others) else ():
        address, number = other.split(":")
        handle.connect_peer((address, int(number)))
    time.sleep(0.05)
print("up" if role == "seed" else "whole", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Machine:
    """The machine that a program runs on."""

    address: str = LOCAL
    entered: tuple[str, ...] = ()
    """Prefix of a command line there."""


class Program:
    """A process that prints lines, and ends when its standard input does."""

    def __init__(self, *line: object) -> None:
        self.cpu = 0.0
        """CPU seconds of the process, once it has ended; 0 until then."""
        self._process = subprocess.Popen(
            [str(word) for word in line],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment() | {"OMP_NUM_THREADS": "1"},
        )

    def tell(self, line: str) -> None:
        """Write one line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        self._process.send_signal(number)

    def said(self, word: str) -> str:
        """Return the next line with ``word`` in it.

        Raises:
            EOFError: There is none in time.
        """
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
    """One run of a system, with its processes."""

    def __init__(self, folder: Path, weights: Path, machines: Sequence[Machine]) -> None:
        """Prepare a course on the machines of origin and receivers, and of `RELAYS` relays if
        they have lines.
        """
        self.folder, self.weights = folder, weights
        self.origin, *others = machines
        self.has_lines = bool(self.origin.entered)
        self.receivers = others[:-RELAYS] if self.has_lines else others
        self.relays = others[-RELAYS:] if self.has_lines else []
        self.began = time.perf_counter()
        """Time at which the clock started."""
        self._programs: list[Program] = []

    def start(self, machine: Machine, *line: object) -> Program:
        """Start a process whose CPU time is counted."""
        program = Program(*machine.entered, *line)
        self._programs.append(program)
        return program

    def python(self, machine: Machine, code: str, *arguments: object) -> Program:
        """Start a Python program."""
        return self.start(machine, sys.executable, "-c", code, *arguments)

    def out(self, number: int) -> Path:
        """Return the folder of one receiver."""
        path = self.folder / f"out{number}"
        path.mkdir()
        return path

    @contextmanager
    def withheld(self, origin: Program) -> Iterator[None]:
        """Stop the origin on lines while receivers start, and start the clock when it goes
        on."""
        if not self.has_lines:
            yield
            return
        origin.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            origin.signal(signal.SIGCONT)
            self.began = time.perf_counter()

    def wait_up(self, programs: Sequence[Program], word: str) -> None:
        """Wait until each program has printed ``word``. Return at once if the course has no
        shaped lines."""
        for program in programs if self.has_lines else ():
            program.said(word)

    def wait_whole(self, programs: Sequence[Program], word: str = "whole") -> float:
        """Return the seconds until the last program has said ``word``."""
        for program in programs:
            program.said(word)
        return time.perf_counter() - self.began

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
        """CPU seconds of all processes."""
        return sum(program.cpu for program in self._programs)


def shoal(course: Course) -> float:
    """Push and pull. Return the seconds until all receivers have the file."""
    with course.ending(ask=False):
        push = course.python(
            course.origin, _CAST.format("push"), course.weights, "--data",
            course.folder / "pusher", *_listening(course.origin),
            "--expect", len(course.receivers),
        )  # fmt: skip
        ticket = json.loads(push.said('"ticket"'))["ticket"]
        with course.withheld(push):
            pulls = [
                course.python(
                    receiver, _CAST.format("pull"), ticket, "--out", course.out(n),
                    *_listening(receiver),
                )
                for n, receiver in enumerate(course.receivers)
            ]  # fmt: skip
            course.wait_up(pulls, '"event": "progress"')
        return course.wait_whole(pulls, '"event": "whole"')


def _listening(machine: Machine) -> tuple[str, ...]:
    return "--listen", f"/ip4/{machine.address}/tcp/0", "--json"


def _curls(course: Course, url: str) -> float:
    if course.has_lines:
        course.began = time.perf_counter()
    curls = [
        course.start(
            receiver, "curl", "-sf", url, "-o", course.out(n) / "weights", "-w", "whole\n"
        )
        for n, receiver in enumerate(course.receivers)
    ]
    return course.wait_whole(curls)


def shoal_serve(course: Course) -> float:
    """Our HTTP edge and curls."""
    os.environ["XDG_STATE_HOME"] = str(course.folder / "state")
    try:
        with course.ending(ask=False):
            serve = course.python(
                course.origin, _CAST.format("serve"), course.weights, "--http",
                f"{course.origin.address}:0", "--json",
            )  # fmt: skip
            [url] = json.loads(serve.said('"http"'))["urls"]
            return _curls(course, f"{url}v/0/raw")
    finally:
        del os.environ["XDG_STATE_HOME"]


def shardcast(course: Course) -> float:
    """PyPI's shardcast: every client takes from the origin, or from all middle nodes."""
    ports = [_free_port() for _ in range(1 + len(course.relays))]
    if course.has_lines:
        os.environ["SHARDCAST_SHARD_SIZE"] = str(SHARD_BYTES)
    with course.ending():
        folder, lock = course.folder / "origin", course.folder / "lock"
        origin = course.python(course.origin, _ORIGIN, folder, ports[0], course.weights)
        origin.said("up")
        urls = [f"http://{course.origin.address}:{ports[0]}"]
        middles = [
            course.python(relay, _MIDDLE, lock, *urls, course.folder / f"middle{port}", port)
            for relay, port in zip(course.relays, ports[1:], strict=True)
        ]
        if middles:
            urls = [
                f"http://{relay.address}:{port}"
                for relay, port in zip(course.relays, ports[1:], strict=True)
            ]
            course.wait_up(middles, "up")
        else:
            origin.tell("go")
        clients = [
            course.python(receiver, _CLIENT, lock, ",".join(urls), course.out(n))
            for n, receiver in enumerate(course.receivers)
        ]
        course.wait_up(clients, "up")
        if middles:
            course.began = time.perf_counter()
            origin.tell("go")
        return course.wait_whole(clients)


def nginx(course: Course) -> float:
    """Measure nginx, from which receivers download with curl."""
    port = _free_port()
    settings = course.folder / "nginx.conf"
    place = f"{course.origin.address}:{port}"
    settings.write_text(
        f"pid {course.folder}/pid; error_log /dev/null; events {{}} daemon off;"
        f" http {{ access_log off; sendfile on; server {{ listen {place};"
        f" root {course.weights.parent}; }} }}\n"
    )
    with course.ending(ask=False):
        course.start(course.origin, "nginx", "-c", settings, "-p", course.folder)
        trial = f"until curl -s {place} >/dev/null; do :; done; echo up"
        course.start(course.origin, "sh", "-c", trial).said("up")
        return _curls(course, f"http://{place}/{course.weights.name}")


def torrent(course: Course, python: str) -> float:
    """Return the seconds that libtorrent takes, with a seed and leechers that all know each
    other."""
    machines = [course.origin, *course.receivers]
    ports = [_free_port() for _ in machines]
    places = [
        f"{machine.address}:{port}" for machine, port in zip(machines, ports, strict=True)
    ]
    made = course.folder / "weights.torrent"
    with course.ending():
        line = python, "-c", _TORRENT
        seed = course.start(
            course.origin, *line, "seed", course.weights.parent, made, course.origin.address,
            ports[0],
        )  # fmt: skip
        seed.said("up")
        with course.withheld(seed):
            leechers = [
                course.start(
                    receiver, *line, "leech", course.out(n), made, receiver.address,
                    ports[n + 1], *places[: n + 1],
                )
                for n, receiver in enumerate(course.receivers)
            ]  # fmt: skip
            course.wait_up(leechers, "begun")
        return course.wait_whole(leechers)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind((LOCAL, 0))
        port: int = taken.getsockname()[1]
        return port


def _subjects(torrent_python: str) -> dict[str, Callable[[Course], float]]:
    """Return the systems that can run here, and print the missing ones."""
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


@dataclass(frozen=True)
class Field:
    """The machines of all turns."""

    machines: Sequence[Machine]
    sent: Callable[[], float]
    """Bytes that the origin's line has carried so far."""


async def _on_lines(
    mbit: float, rtt: float, receivers: int, play: Callable[[Field], None]
) -> None:
    """Run ``play`` in a thread, among machines with lines."""
    config = EmulationConfig(delay=rtt / 2)
    link = LinkSpec(up=mbit, down=mbit)
    async with open_emulation(config) as emulation:
        machines = [
            await emulation.add(f"m{number}", link, lambda _: None)
            for number in range(1 + receivers + RELAYS)
        ]

        async def sent() -> float:
            return float((await emulation.sent_bytes())["m0"])

        field = Field(
            [Machine(machine.address, machine.entered) for machine in machines],
            partial(trio.from_thread.run, sent),
        )
        await trio.to_thread.run_sync(play, field)


def run(argv: Sequence[str]) -> int:
    """Print and write the figures; over loopback 1 if Shoal costs more CPU than libtorrent,
    where that is."""
    parser = argparse.ArgumentParser(
        prog="python -m bench shardcast",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--mbit", type=float, help="lines of so many Mbit/s, not loopback")
    parser.add_argument(
        "--rtt", type=float, default=0.02, help="seconds there and back, with --mbit (0.02)"
    )
    parser.add_argument("--only", nargs="+", metavar="SYSTEM", help="of those above")
    parser.add_argument(
        "--noise", action="store_true", help="bytes that no system can compress"
    )
    parser.add_argument("--torrent-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    subjects = _subjects(options.torrent_python)
    # What pip installs has its byte code; without it, nine programs would compile ours first.
    compileall.compile_dir(ROOT / "p2p", quiet=1)
    for name in set(options.only or ()) - subjects.keys():
        parser.error(f"--only: there is no {name!r} here, but {', '.join(subjects)}")
    subjects = {name: subjects[name] for name in options.only or subjects}
    found: dict[tuple[str, str], list[float]] = {}
    make = partial(write_weights, size=options.mib * MIB, noise=options.noise)
    play = partial(_play, make, options.rounds, subjects, found)
    if options.mbit is None:
        play(Field([Machine()] * (1 + options.receivers), lambda: 0.0))
        case = f"{options.mib} MiB to {options.receivers}"
    else:
        trio.run(_on_lines, options.mbit, options.rtt, options.receivers, play)
        case = (
            f"{options.mib} MiB to {options.receivers}, {options.mbit:g} Mbit/s,"
            f" {options.rtt * 1000:g} ms"
        )
    report = Report("shardcast")
    for (name, metric), values in found.items():
        report.add(case, name, metric, "", values)
    costs: dict[str, Any] = {
        name: report.compare(case, "CPU s/GB", "shoal", name)
        for name in subjects
        if name != "shoal" and "shoal" in subjects
    }
    for name in costs:
        report.compare(case, "seconds", name, "shoal")
    print(report)
    report.write(options.json)
    return int(options.mbit is None and costs.get("libtorrent", 0.0) > 1)


def _play(
    make: Callable[[Path], None],
    rounds: int,
    subjects: dict[str, Callable[[Course], float]],
    found: dict[tuple[str, str], list[float]],
    field: Field,
) -> None:
    """Play all rounds, and put their cost into ``found``."""
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (base / "source").mkdir()
        weights = base / "source" / "weights"
        make(weights)
        size = weights.stat().st_size
        for _ in range(rounds):
            for name, play in subjects.items():
                before = field.sent()
                with tempfile.TemporaryDirectory(dir=base) as folder:
                    course = Course(Path(folder), weights, field.machines)
                    seconds = play(course)
                metrics = {
                    "seconds": seconds,
                    "CPU s/GB": course.cpu * GB / size / len(course.receivers),
                }
                if course.has_lines:
                    metrics["origin sent"] = (field.sent() - before) / size
                for metric, value in metrics.items():
                    found.setdefault((name, metric), []).append(value)
                print(f"{name}: {metrics}", file=sys.stderr)
