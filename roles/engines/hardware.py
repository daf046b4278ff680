"""Cores, GPUs and installed engines of this machine, found without importing torch.

A worker process and ``shoal doctor`` ask. The most frequent problem is a GPU that torch cannot
see: PyPI's builds for some systems, and every build from PyTorch's CPU index, have no CUDA, and
do not report the unused card.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path
from typing import Final

from roles.engines.config import EngineConfig

_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
"""File with the CPU quota of a container: microseconds of CPU in each period, and the period,
or ``max``."""
_CARDS: Final = ("nvidia[0-9]*", "kfd")
"""Patterns of files under /dev: one for each of NVIDIA's cards, and one for AMD's."""
_SECONDS: Final = 10.0
"""Timeout of nvidia-smi: it takes a second, and more where the driver has to wake up."""
CUDA_BUILD: Final = "pip install --force-reinstall torch --index-url URL"
"""Command that installs a torch with CUDA; URL is in PyTorch's own table of builds."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, as its driver names it."""

    name: str
    memory: int
    """Bytes; 0 if the driver does not say."""


def cores() -> int:
    """Return the number of cores that this process may use, by machine, affinity and
    container."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text().split()
        if quota != "max":
            count = min(count, ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return count
    return max(1, count)


def free_memory() -> float:
    """Return the bytes that processes may still allocate: the kernel's available memory, within
    the control group's limit. Infinite where neither is known, as on macOS."""
    free = _number_in(Path("/proc/meminfo"), "MemAvailable:") * 1024
    group = Path("/sys/fs/cgroup")
    allowed, used = _number_in(group / "memory.max"), _number_in(group / "memory.current")
    return min(free, max(0.0, allowed - used) if used < float("inf") else allowed)


def _number_in(path: Path, key: str = "") -> float:
    """Return the number that follows ``key`` in a file of the kernel; infinite if there is
    none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            if line.startswith(key):
                return float(line[len(key) :].split()[0])
    return float("inf")


def threads_of(config: EngineConfig, usable: int | None = None) -> int:
    """Return the threads of each process of an engine: as its owner says, or all cores less
    one, which is left to the node, divided by the number of processes that share a learner."""
    if config.threads:
        return config.threads
    free = (cores() if usable is None else usable) - 1
    return max(1, free // config.gpus.ranks)


def gpus(devices: Path = Path("/dev"), query: Sequence[str] = ("nvidia-smi",)) -> list[Gpu]:
    """Return the GPUs that the system knows, even if torch does not. Apple's GPUs are part of
    the processor and are not listed."""
    if platform.system() == "Darwin":
        return [Gpu("Apple GPU", 0)] if platform.machine() == "arm64" else []
    files = [path for pattern in _CARDS for path in sorted(devices.glob(pattern))]
    if not files:
        return []
    asked = _asked([*query, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    return asked or [Gpu(path.name, 0) for path in files]


def _asked(command: Sequence[str]) -> list[Gpu]:
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in said.stdout.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if name and mebibytes.strip().isdigit():
            found.append(Gpu(name.strip(), int(mebibytes) << 20))
    return found


def torch_version() -> str:
    """Return the installed version with its build (``2.13.0+cpu``); empty without torch."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def idle_gpus(cards: Sequence[Gpu], device: str, seen: int, build: str) -> str:
    """Return a sentence for an owner whose GPUs are unused, with the remedy; empty if none is
    unused.

    ``device`` is what the engine computes on, ``seen`` how many GPUs its torch ``build`` sees.
    """
    if not cards:
        return ""
    here = f"this machine has {len(cards)} GPUs ({cards[0].name})"
    if device == "cpu" and not seen:
        return f"{here}, and torch {build} sees none of them: {CUDA_BUILD} (shoal doctor)"
    if device == "cpu":
        return f"{here}, and the engine computes on the CPU: start it with --device auto"
    return ""
