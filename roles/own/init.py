"""``shoal run init DIR``: everything that a run of one's own needs, in one folder."""

from __future__ import annotations

import argparse
import json
import shutil
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from p2p.errors import ConfigError, ShoalError
from p2p.identity import PeerId
from p2p.machine import load_or_create_key
from p2p.node.process import check_key_place, check_platform
from p2p.node.toml import load_toml
from p2p.node.usage import FAILED, WRONG_USAGE, complain, expanded, remark, say
from roles.contract import Run
from roles.contract.core.file import MAX_NAME
from roles.doctor.sighting import try_port
from roles.models.errors import BadModel
from roles.models.fetch import base_folder
from roles.own.draft import (
    check_calibrated,
    check_environments,
    read_draft,
)
from roles.own.drafts import Plan, complete, files_of, read_source, with_ids, write_draft
from roles.own.editions import SignedBefore, sign_edition, write_edition
from roles.own.layout import INFERENCE, TRAINER, VALIDATOR, RunFolder, lay_base
from roles.own.trial import try_run
from roles.protocol.model_files import FOLDER
from roles.rl.learner import write_learner
from roles.rl.recipes import kind_of

PORT: Final = 4001
"""Where the trainer listens by the lines that are printed: libp2p's usual port."""
PORTS: Final = 32
"""Of those from `PORT` on, so many are tried: another run on this machine may have it."""


def main(options: argparse.Namespace) -> int:
    """Make the folder, and say how each node is started; the exit code."""
    try:
        check_platform()
        _check(options)
        folder = RunFolder(expanded(options.folder).absolute())
        run = make(folder, _draft(options, folder), options.nodes)
    except (ConfigError, BadModel) as error:
        complain(error)
        return WRONG_USAGE
    except (ShoalError, OSError) as error:
        complain(error)
        return FAILED
    say("\n".join(describe(folder, run)))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise `ConfigError` if the options do not go together."""
    if options.draft is not None and (options.model or options.env):
        raise ConfigError("--draft says what --model and --env say: give the one or the others")


def _draft(options: argparse.Namespace, folder: RunFolder) -> str:
    """The text of the draft, without ids. Raises `ConfigError`."""
    if options.draft is not None:
        table = load_toml(options.draft)
        return complete(options.draft.read_text(encoding="utf-8-sig"), table, options.draft)
    name = "".join(sign for sign in folder.path.name if sign.isprintable())[:MAX_NAME]
    sources = tuple(read_source(text) for text in options.env or ())
    return write_draft(Plan(name or "run", options.model or "", sources))


def make(folder: RunFolder, text: str, nodes: int) -> Run:
    """Make keys, draft, run file and what each node needs. Raises `ConfigError`.

    The run file is written last: without it the folder is not a run's, and the same command
    goes on where it was ended.
    """
    if folder.document.exists():
        raise ConfigError(
            f"{folder.path} holds a run already: start it with shoal run start {folder.path},"
            f" or sign another edition of it as the first lines of {folder.draft} say"
        )
    if not str(folder.path).isprintable():
        raise ConfigError(f"{str(folder.path)!r} has signs that no line of a draft can hold")
    check_key_place(folder.owner)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder.path} cannot be made: {error.strerror}") from None
    names = [TRAINER, VALIDATOR, *folder.workers(nodes)]
    peers = {name: _peer(folder.node(name) / "key") for name in names}
    written = with_ids(_with_data(folder, text), folder.path, peers[TRAINER], peers[VALIDATOR])
    table = tomllib.loads(written)
    now = time.time()  # noqa: TID251 - a tool for people, outside any node
    terms = read_draft(table, str(folder.draft), now)
    check_calibrated(terms)
    check_environments(table, str(folder.draft))
    owner = load_or_create_key(folder.owner)
    try:
        run = sign_edition(terms, owner, folder.owner, folder.document)
    except SignedBefore as error:
        raise ConfigError(
            f"{error.before}: put {error.file} back, or name another folder than {folder.path}"
        ) from None
    folder.draft.write_text(written, encoding="utf-8")
    folder.learner.write_text(_learner(run), encoding="utf-8")
    folder.config.write_text(_config(folder, run), encoding="utf-8")
    base = table.get("model", {}).get("base")
    if base is not None:
        lay_base(base_folder(base, "base"), folder.node(TRAINER) / FOLDER, run)
        remark("one task goes through chat template, tokenizer, engine and reward ...")
        try_run(run, folder.node(TRAINER), str(folder.data))
    write_edition(run, folder.owner, folder.document)
    return run


def _peer(key: Path) -> PeerId:
    return load_or_create_key(key).peer_id


def _with_data(folder: RunFolder, text: str) -> str:
    """The draft with its files of questions copied to the folder: a run pins them, and a file
    that somebody goes on editing elsewhere would not be the pinned one any more."""
    taken: dict[Path, str] = {}
    for file in files_of(tomllib.loads(text)):
        copy = folder.data / Path(file).name
        if taken.setdefault(copy, file) != file:
            raise ConfigError(f"{taken[copy]} and {file} have one name: rename one of them")
        if Path(file).exists() and not Path(file).is_file():  # a device has no end
            raise ConfigError(f"{file} is no regular file")
        try:
            folder.data.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
        text = text.replace(json.dumps(file), json.dumps(str(copy)))
    return text


def _config(folder: RunFolder, run: Run) -> str:
    """For every node of the folder: a node reads the table of its own role."""
    every = 10 if run.terms.model.base else 1
    lines = [
        "# Where each node has a machine for itself, threads = 0 takes all cores less one.",
        "[role.trainer]",
        "threads = 1",
        f"{f'checkpoint_every = {every}':<32}# steps taken again, at most, after a crash",
    ]
    lines += ["", "[role.validator]", "threads = 1", "", "[role.inference]", "threads = 1"]
    if folder.data.exists():
        for role in (TRAINER, VALIDATOR, INFERENCE):
            lines += [
                "",
                f"[role.{role}.machine]",
                f"environment_data = {json.dumps(str(folder.data))}",
            ]
    return "\n".join(lines) + "\n"


def _learner(run: Run) -> str:
    model = run.terms.model
    kind = kind_of(model.shape.parameters, has_base=bool(model.base))
    return write_learner(replace(kind.learner, run=run.name), kind.reasons)


def describe(folder: RunFolder, run: Run) -> Iterator[str]:
    """What was made, and what comes next."""
    model = run.terms.model
    kind = kind_of(model.shape.parameters, has_base=bool(model.base))
    tasks = ", ".join(pin.name for pin in run.terms.environments)
    yield f"run      {run.name}, id {run.id.hex()[:16]}"
    yield f"model    {model.shape.parameters:,} parameters: {kind.name}"
    yield f"tasks    {tasks}"
    yield f"recipe   {run.terms.sampling.steps} steps at a rate of {kind.learner.rate:g}"
    yield f"draft    {folder.draft}: change it and sign it again as its first lines say"
    yield f"owner    {folder.owner}: whoever has it owns the run; no node needs it"
    yield ""
    yield f"next     shoal run start {folder.path}"
    yield "         plays all nodes on this machine. Each by itself, the trainer first:"
    yield ""
    yield from start_lines(folder, run)
    yield ""
    yield "         On other machines: copy the node's folder there, with node.toml, and write"
    yield "         the trainer's address for 127.0.0.1."


def start_lines(folder: RunFolder, run: Run) -> Iterator[str]:
    """The command of each node."""
    (trainer,) = run.terms.trainers
    tried = range(PORT, PORT + PORTS)
    port = next((one for one in tried if not try_port(one)), PORT)
    for name, role in folder.cast().items():
        line = f"shoal node --role {role} --data {folder.node(name)} --config {folder.config}"
        if role == TRAINER:
            yield f"{line} --run {folder.document} --listen /ip4/0.0.0.0/tcp/{port}"
        else:
            yield f"{line} --bootstrap /ip4/127.0.0.1/tcp/{port}/p2p/{trainer}"
