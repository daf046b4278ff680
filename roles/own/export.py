"""``shoal run export DIR -o FOLDER``: a run's model, for other programs and other people.

With ``-o`` a ``.parquet`` or ``.jsonl`` it is the answers (`roles.own.rollouts`).

The folder has Hugging Face's layout: weights, configuration, tokenizer and chat template, and a
card. transformers, vLLM and ``shoal chat`` open it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from p2p.errors import ConfigError
from p2p.node.usage import expanded, remark, say
from roles.chat.find import Found, find_models
from roles.contract import Run
from roles.contract.core.pin import WEIGHTS_SUFFIX
from roles.engines.adapters import read_adapter, write_peft
from roles.models.bundle import CONFIG, WEIGHTS
from roles.models.config import ModelConfig, write_config
from roles.own import rollouts
from roles.protocol.model_files import FOLDER
from roles.trainer.curve import PROGRESS
from roles.trainer.policies import CHECKPOINT

CARD = "README.md"


def main(options: argparse.Namespace) -> int:
    """Write the folder.

    Raises:
        ConfigError: The options or the run's folder are wrong.
    """
    folder, target = expanded(options.folder).absolute(), expanded(options.out).absolute()
    if target.suffix in rollouts.SUFFIXES:
        if options.policy is not None:
            raise ConfigError("--policy is of a model: a file of answers has those of all")
        return rollouts.export(folder, target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"-o {target}: it exists already; name a new folder")
    if options.adapter and options.policy is not None:
        raise ConfigError("--adapter is of the trainer's newest checkpoint: leave out --policy")
    if options.adapter:
        return _export_adapter(folder, target)
    found = find_models(folder, options.policy).newest
    try:
        _write(found, target)
        if not (target / CARD).exists() and found.run is not None:
            card = "\n".join(model_card(found, found.run, _learnt(folder)))
            (target / CARD).write_text(card + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"-o {target} cannot be written: {error.strerror}") from None
    say(f"{found.label}: {target}")
    if (target / "tokenizer.json").exists():
        say(f"shoal chat {target}")
    else:
        remark("this network has no tokenizer: its tokens are its environment's")
    return 0


def _export_adapter(folder: Path, target: Path) -> int:
    """Write the adapter of a trainer with ``[lora]``, from its newest checkpoint."""
    checkpoints = [
        path
        for node in (folder, *sorted(folder.glob("*")))
        if (path := node / CHECKPOINT).is_file()
    ]
    adapter = read_adapter(checkpoints[0]) if checkpoints else None
    if adapter is None:
        raise ConfigError(
            f"{folder}: no trainer here has learnt an adapter; one does with [lora] in its"
            " learner.toml. Leave out --adapter for the whole model"
        )
    base = checkpoints[0].parent.parent / FOLDER
    try:
        write_peft(adapter, str(base), target)
    except OSError as error:
        raise ConfigError(f"-o {target} cannot be written: {error.strerror}") from None
    say(f"adapter of rank {adapter.rank} at step {adapter.step}: {target}")
    remark(f"it belongs to the run's base, {base}")
    return 0


def _write(found: Found, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    if (found.path / CONFIG).is_file():
        for path in found.path.iterdir():
            if path.is_file():
                _copy(path, target / path.name)
        return
    if found.run is None:
        raise ConfigError(f"{found.path} are weights, and no run file beside them says of what")
    model = found.run.terms.model
    config = ModelConfig(
        shape=model.shape,
        context=model.context,
        dtype=model.dtype.value,
        end_tokens=model.end_tokens,
    )
    (target / CONFIG).write_bytes(write_config(config))
    _copy(found.path, target / WEIGHTS)


def _copy(source: Path, target: Path) -> None:
    """Copy the files. Weights, which nobody edits, are linked if they are on the same disk."""
    if source.suffix == WEIGHTS_SUFFIX:
        with suppress(OSError):
            os.link(source.resolve(), target)
            return
    shutil.copyfile(source, target)


def _learnt(folder: Path) -> dict[str, Any]:
    """Return the trainer's progress file; empty if it is not here."""
    for node in (folder, *sorted(folder.glob("*"))):
        with suppress(OSError, ValueError):
            found = json.loads((node / PROGRESS).read_bytes().partition(b"\n")[2])
            if isinstance(found, dict):
                return found
    return {}


def model_card(found: Found, run: Run, learnt: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the card: where the model comes from, and how it was measured."""
    terms, sampling = run.terms, run.terms.sampling
    yield f"# {found.label}"
    yield ""
    yield (
        f"Trained with Shoal in run {run.name!r} (id `{run.id.hex()}`, edition {run.epoch},"
        f" owner `{run.owner}`) on {', '.join(pin.name for pin in terms.environments)}:"
        f" {sampling.steps} steps, groups of {sampling.group_size} answers of at most"
        f" {sampling.max_new_tokens} tokens at temperature {sampling.temperature:g}."
    )
    yield ""
    if terms.model.base:
        yield "It began with these files (sha256):"
        yield ""
        for pin in terms.model.base:
            yield f"- {pin.name} `{pin.digest.hex()}`"
    else:
        yield f"It began with weights that were drawn from seed {terms.model.seed}."
    yield ""
    yield "Tasks (sha256 of the environment's source, of its questions):"
    yield ""
    for environment in terms.environments:
        data = environment.data
        asked = "" if data is None else f", {data.name} `{data.digest.hex()}`"
        yield f"- {environment.name} `{environment.digest.hex()}`{asked}"
    yield ""
    for role, peers in (("Trainer", terms.trainers), ("Validator", terms.validators)):
        for peer in peers:
            yield f"- {role} `{peer}`"
    if curve := learnt.get("curve"):
        yield ""
        yield "| step | held-out reward, greedy | sampled |"
        yield "|---|---|---|"
        for step, greedy, sampled in curve:
            yield f"| {step} | {greedy:.3f} | {sampled:.3f} |"
