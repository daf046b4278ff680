"""The facts that the doctor collects: about this machine, and about a run's needs.

torch is asked in a process of its own: a build for another system may end the process that
imports it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any, Final

import trio

from p2p.errors import ConfigError, StorageError
from p2p.machine import KEY, decode_key
from p2p.multiaddr import Multiaddr
from p2p.node.dashboard.commands import read
from p2p.node.process import check_key_place
from p2p.sandbox import Containment
from p2p.sandbox.launch import find_containment
from p2p.shardcast.config import ShardcastConfig
from roles.contract import Run
from roles.doctor.asking import Answer, DialIn, ask, dial_in
from roles.engines.config import memory_needed
from roles.engines.hardware import Gpu, cores, gpus

OURS: Final = "shoal"
"""Name of our distribution."""
PACKAGES: Final = ("p2p", "roles", "proofs", "sim")
"""Packages of our distribution. PyPI has distributions of others with packages of these
names.
"""
_TORCH_SECONDS: Final = 120.0
"""Most seconds for importing torch: it takes two, and a minute from a cold disk."""
_ASK_TORCH: Final = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
cards = [torch.cuda.get_device_properties(number) for number in range(count)]
print(json.dumps({
    "version": torch.__version__,
    "cards": [[card.name, card.total_memory] for card in cards],
    "mps": torch.backends.mps.is_available(),
}))
"""
_MASTER_BYTES: Final = 24
"""Bytes per parameter in a trainer's two generations of checkpoints: weights and two moments in
float32 each."""
_POLICY_BYTES: Final = 4
"""Bytes per parameter of a policy that is kept: two in bfloat16, and as many while the next
policy arrives."""


@dataclass(frozen=True, slots=True)
class Torch:
    """Facts that torch tells about itself."""

    version: str = ""
    """Version of torch with its build, such as ``2.13.0+cpu``; empty if torch is not installed
    or does not load."""
    cards: tuple[Gpu, ...] = ()
    """The GPUs that it sees."""
    has_mps: bool = False
    failure: str = ""
    """Why it does not load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A run's requirements of a machine."""

    name: str
    memory: int
    """Bytes of its largest job, by `roles.engines.config.memory_needed`."""
    disk: int
    """Bytes on the disk of its trainer, the role that keeps most."""
    expiry: float
    """Wall clock after which nobody takes part in it."""
    id: bytes = b""
    epoch: int = 1
    """Epoch of the newest edition that was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """The scorer of the trainer or validator that runs in the node's folder."""

    role: str
    queue: float
    """Number of places that wait."""
    oldest: float
    """Seconds that the place which waits longest has waited."""
    busy: float
    """Share of its time that it works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Facts about a machine that the checks need."""

    python: tuple[int, int] = (3, 11)
    torch: Torch = field(default_factory=Torch)
    cards: tuple[Gpu, ...] = ()
    """The GPUs that the system knows."""
    cores: int = 4
    memory: int = 0
    """Bytes of the CPU's memory; 0 where the system does not say."""
    folder: str = ""
    """Folder of the node's data."""
    has_folder: bool = True
    """True if the folder exists."""
    disk: int = 0
    """Bytes free on the disk of the folder."""
    now: float = 0.0
    """Time of the wall clock."""
    newest: float = 0.0
    """Time of the newest of our own files, and of the run's."""
    port: int = 0
    """Port that the node is to listen at; 0: any free one."""
    port_failure: str = ""
    """Why nobody can listen at the port; empty if a node can."""
    need: Need | None = None
    """Needs of the run that was named, is pinned in the folder, or that a bootstrap peer is
    in."""
    folder_failure: str = ""
    """Why nothing can be written to the folder; empty if it can."""
    has_key: bool = True
    """True if the folder has a key."""
    key_failure: str = ""
    """Why the key in the folder cannot be used; empty if it can."""
    sandbox: Containment = field(default_factory=Containment)
    """The mechanism that contains environments here."""
    owners: tuple[str, ...] = ()
    """Other distributions that install a package with one of our names."""
    answers: tuple[Answer, ...] = ()
    """Answers of the bootstrap peers."""
    came: DialIn = field(default_factory=DialIn)
    """Result of the bootstrap peers' dials to this machine."""
    must_be_open: str = ""
    """Why others must be able to dial this machine; empty if a node here may do without."""
    scoring: Scoring | None = None
    """The queue of a trainer or validator; None if neither runs in the folder."""


def need_of(run: Run) -> Need:
    """Return the requirements of ``run`` for a machine that does any of its jobs."""
    model = run.terms.model
    kept = ShardcastConfig().keep_versions * _POLICY_BYTES + _MASTER_BYTES
    return Need(
        name=run.name,
        memory=max(
            memory_needed(model.shape, run.terms.sampling, model.context),
            run.terms.admission.min_memory,
        ),
        disk=kept * model.shape.parameters,
        expiry=run.expiry,
        id=run.id,
        epoch=run.epoch,
    )


def look(
    folder: Path,
    *,
    port: int = 0,
    run: Run | None = None,
    document: Path | None = None,
    bootstrap: Sequence[Multiaddr] = (),
    is_open: bool = False,
) -> Sighting:
    """Inspect this machine. ``document`` is the file of ``run``; ``is_open`` is True if others
    are to join through this machine."""
    ours = [Path(__file__), *([] if document is None else [document])]
    answers = ask(bootstrap)
    is_behind = any(one.observed not in ("", one.local) for one in answers)
    came = (
        trio.run(partial(dial_in, bootstrap, port, is_behind=is_behind))
        if answers
        else DialIn()
    )
    return Sighting(
        python=sys.version_info[:2],
        torch=ask_torch(),
        cards=tuple(gpus()),
        cores=cores(),
        memory=_memory(),
        folder=str(folder.absolute()),
        has_folder=folder.exists(),
        disk=shutil.disk_usage(_existing(folder)).free,
        now=time.time(),  # noqa: TID251 - a command line, outside every world
        newest=max(path.stat().st_mtime for path in ours),
        port=port,
        port_failure=try_port(port) if port else "",
        need=_newest(run, answers),
        folder_failure=try_folder(folder),
        has_key=(folder / KEY).exists(),
        key_failure=try_key(folder / KEY),
        sandbox=_containment(folder),
        owners=tuple(other_owners()),
        answers=answers,
        came=came,
        must_be_open=_why_open(folder, run or _told(answers), is_open=is_open),
        scoring=ask_scorer(folder),
    )


def _why_open(folder: Path, run: Run | None, *, is_open: bool) -> str:
    if is_open:
        return "others are to join through it"
    try:
        own = decode_key(folder / KEY, (folder / KEY).read_bytes()).peer_id
    except (OSError, StorageError):
        return ""
    return "the run names it as trainer or validator" if run and own in run.officers else ""


def ask_scorer(folder: Path) -> Scoring | None:
    """Return the scorer's state as the node that runs in ``folder`` reports it."""

    try:
        return scoring_of(read(folder, "/metrics").decode())
    except (ConfigError, UnicodeDecodeError):
        return None


def scoring_of(metrics: str) -> Scoring | None:
    """Return the scorer's state from a node's ``/metrics``; None if the node has no scorer."""
    lines = (line.rpartition(" ") for line in metrics.splitlines() if line[:1] != "#")
    values = {name: float(value) for name, _, value in lines}
    for role, queue in (("trainer", "scorer_queue"), ("validator", "queue")):
        keys = (queue, "scorer_oldest_seconds", "scorer_busy_ratio")
        names = [f"shoal_{role}_{key}" for key in keys]
        if all(name in values for name in names):
            waiting, oldest, busy = (values[name] for name in names)
            return Scoring(role=role, queue=waiting, oldest=oldest, busy=busy)
    return None


def _newest(run: Run | None, answers: Sequence[Answer]) -> Need | None:
    """Return the needs of the newest edition known of ``run``, or of the run that the first
    bootstrap peer names if ``run`` is None. None if there is no run."""
    told = [one.run for one in answers if one.run is not None]
    named = run or _told(answers)
    if named is None:
        return None
    return need_of(
        max((named, *(one for one in told if one.id == named.id)), key=lambda one: one.epoch)
    )


def _told(answers: Sequence[Answer]) -> Run | None:
    """Return the run of the first peer that names one; None if no peer does."""
    return next((one.run for one in answers if one.run is not None), None)


def ask_torch(python: str = sys.executable) -> Torch:
    """Return the facts that the torch of ``python`` tells about itself."""
    try:
        asked = subprocess.run(
            [python, "-W", "ignore", "-c", _ASK_TORCH],
            capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Torch(failure=str(error))
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or [f"it ended with status {asked.returncode}"]
        is_absent = "No module named 'torch'" in said[-1]
        return Torch(failure="" if is_absent else said[-1])
    try:
        answer: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return Torch(failure=f"it says {asked.stdout[-80:]!r} of itself")
    cards = tuple(Gpu(name, memory) for name, memory in answer["cards"])
    return Torch(answer["version"], cards, answer["mps"])


def try_port(port: int) -> str:
    """Return the reason why a node cannot listen at TCP ``port``; empty if it can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except (OSError, OverflowError) as error:
            return getattr(error, "strerror", None) or str(error)
    return ""


def try_folder(folder: Path) -> str:
    """Return the reason why a node cannot keep its data in ``folder``; empty if it can."""
    place = _existing(folder)
    if not place.is_dir():
        return f"{place} is no folder"
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"{place}: {error.strerror}"


def try_key(path: Path) -> str:
    """Reason why the key at ``path`` is invalid or must not be there; empty if a node may use
    or make it."""
    try:
        check_key_place(path)
        if path.exists():
            decode_key(path, path.read_bytes())
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (ConfigError, StorageError) as error:
        return str(error)
    return ""


def _containment(folder: Path) -> Containment:
    try:
        return find_containment(str(folder))
    except OSError as error:
        return Containment(reason=f"no process can be started: {error.strerror}")


def other_owners() -> list[str]:
    """Return the other distributions that bring a package with one of our names.

    Python finds either of the two by chance.
    """
    owners = packages_distributions()
    found: dict[str, list[str]] = {}
    for package in PACKAGES:
        for name in owners.get(package, ()):
            if name != OURS:
                found.setdefault(name, []).append(package)
    return [f"{name} {version(name)} ({', '.join(found[name])})" for name in sorted(found)]


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # names that this system does not know
        return 0


def _existing(folder: Path) -> Path:
    """Return ``folder``, or its nearest ancestor that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
