"""``shoal run init DIR``: everything that a run of one's own needs, in one folder."""

from __future__ import annotations

import argparse
import json
import shutil
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from p2p.errors import ConfigError, ShoalError
from p2p.machine import load_or_create_key
from p2p.node.process import check_key_place, check_platform
from p2p.node.tables import load_toml, parse_toml, write_toml
from p2p.node.usage import FAILED, WRONG_USAGE, complain, expanded, patience, remark, say
from roles.contract import Run, Terms
from roles.contract.core.diloco import Algorithm, Goal
from roles.contract.core.file import MAX_NAME
from roles.doctor.sighting import try_port
from roles.envs.data import MAX_DATA
from roles.envs.questions import QUESTIONS
from roles.models.errors import BadModel
from roles.models.fetch import MODELS, base_folder
from roles.own.draft import (
    DAY,
    Plan,
    Source,
    check_calibrated,
    check_environments,
    data_files,
    digest_of,
    load_draft,
    read_draft,
    read_source,
    with_people,
    write_draft,
)
from roles.own.editions import SignedBefore, draft_of, sign_edition, write_edition
from roles.own.layout import INFERENCE, TRAINER, VALIDATOR, RunFolder, lay_base, link_files
from roles.own.people import load_run
from roles.own.pretraining import EXPORTS, open_text, read_corpora, write_pretraining
from roles.own.tables import as_question, as_text, convert, is_other_form
from roles.own.trial import try_run
from roles.protocol.model_files import FOLDER
from roles.rl.learner import FILE as LEARNER, write_learner
from roles.rl.recipes import kind_of, read_learner

PORT: Final = 4001
"""Port of the trainer in the printed commands: libp2p's usual port."""
PORTS: Final = 32
"""Ports tried from `PORT` on, since another run on this machine may use the first ones."""


def main(options: argparse.Namespace) -> int:
    """Make the folder, and say how each node is started; the exit code."""
    try:
        check_platform()
        if options.draft is not None and (options.model or options.env or options.diloco):
            raise ConfigError(
                "--draft says what --model, --env and --diloco say: give the one or the others"
            )
        if options.corpus and not (options.diloco or options.draft):
            raise ConfigError("--corpus is text to pre-train on: add --diloco")
        if options.env and options.diloco:
            raise ConfigError("--diloco learns from text: give --corpus PATH instead of --env")
        folder = RunFolder(expanded(options.folder).absolute())
        corpora = _converted(read_corpora(options.corpus or ()), folder)
        text, place = _draft(options, folder, corpora)
        beside = place / LEARNER if options.draft is not None else None
        rules = beside.read_text("utf-8-sig") if beside and beside.exists() else ""
        run = make(folder, text, place, options.nodes, rules, corpora)
    except (ConfigError, BadModel) as error:
        complain(error)
        return WRONG_USAGE
    except (ShoalError, OSError) as error:
        complain(error)
        return FAILED
    say("\n".join(describe(folder, run)))
    return 0


def _draft(
    options: argparse.Namespace, folder: RunFolder, corpora: Mapping[str, Path]
) -> tuple[str, Path]:
    """Return the text of the draft, without ids, and the folder that its paths start from.

    Raises:
        ConfigError: The options make no draft.
    """
    if options.draft is not None:
        table = load_toml(options.draft)
        for key in ("trainers", "validators"):
            if key in table:
                raise ConfigError(
                    f"{options.draft} names {key} already, and init makes new ones: remove"
                    " that line, or sign it as it is with shoal run create"
                )
        return options.draft.read_text(encoding="utf-8-sig"), options.draft.parent
    name = "".join(sign for sign in folder.path.name if sign.isprintable())[:MAX_NAME]
    sources = tuple(read_source(text) for text in options.env or ())
    if options.diloco:
        sources = tuple(Source(*one) for one in corpora.items())
    plan = Plan(name or "run", options.model or "", sources)
    return (write_pretraining if options.diloco else write_draft)(plan), Path()


def make(
    folder: RunFolder,
    text: str,
    place: Path,
    nodes: int | None,
    learner: str = "",
    corpora: Mapping[str, Path] = MappingProxyType({}),
) -> Run:
    """Make keys, draft, run file and each node's files.

    The run file is written last: without it the folder is not a run's, and the same command
    goes on where it was ended.

    Args:
        folder: Folder of the run.
        text: The draft, without ids.
        place: Folder from which the draft names its files of questions.
        nodes: Inference nodes; in a run of DiLoCo trainers. None: 2 and 3.
        learner: Text of a ``learner.toml``; empty: with the numbers for this kind of model.
        corpora: Where the text of a run that pre-trains lies.

    Raises:
        ConfigError: No node could work on such a run.
    """
    if folder.document.exists():
        raise ConfigError(
            f"{folder.path} holds a run already: start it with shoal run start {folder.path},"
            f" which signs what you change in {folder.draft}"
        )
    if not str(folder.path).isprintable():
        raise ConfigError(f"{str(folder.path)!r} has signs that no line of a file can hold")
    check_key_place(folder.owner)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder.path} cannot be made: {error.strerror}") from None
    where, table = str(folder.draft), tomllib.loads(text)
    is_diloco = table.get("algorithm") == Algorithm.DILOCO.value
    many = TRAINER if is_diloco else INFERENCE
    count = nodes or (3 if is_diloco else 2)
    names = [] if is_diloco else [TRAINER, VALIDATOR]
    names += [f"{many}-{number}" for number in range(1, count + 1)]
    for name in names:
        check_key_place(folder.node(name) / "key", folder.path)
    peers = {name: load_or_create_key(folder.node(name) / "key").peer_id for name in names}
    _copy_data(folder, data_files(table, place), data_files(table, place, QUESTIONS))
    people: dict[str, object] = {
        f"{role}s": [str(peer) for name, peer in peers.items() if name.startswith(role)]
        for role in (TRAINER, VALIDATOR)
    }
    workers = [str(peer) for name, peer in peers.items() if name.startswith(INFERENCE)]
    if workers and "allowed" not in table.get("admission", {}):
        people["admission"] = {
            "allowed": workers
        }  # the owner's, who owe no work before it counts
    now = time.time()  # noqa: TID251 - a tool for people, outside any node
    base = table.get("model", {}).get("base")
    if base is not None and base not in MODELS and not expanded(Path(base)).is_absolute():
        raise ConfigError(f"{where}: write base = {base!r:.80} as a whole path, from / or ~ on")
    terms = read_draft(with_people(table, people), where, now, folder.path)
    check_calibrated(terms)
    check_environments(terms, data_files(table, folder.path))
    is_text = is_diloco and terms.diloco.goal is Goal.TEXT
    rules = "" if is_text else _learner(folder, terms, learner)
    if is_text:
        places = {name: str(path) for name, path in corpora.items()}
        with patience("reading the text ..."):
            found = open_text(terms, base_folder(base, "base") if base else None, places)
        learnt = terms.diloco.total_steps * terms.diloco.sequences * count
        remark(
            f"{found.tokens.size:,} tokens of text: {count} trainers go"
            f" {learnt / found.starts.size:.1f} times over them"
        )
    owner = load_or_create_key(folder.owner)
    try:
        run = sign_edition(terms, owner, folder.owner, folder.document)
    except SignedBefore as error:
        raise ConfigError(
            f"{error.before}: put {error.file} back, or name another folder than {folder.path}"
        ) from None
    folder.draft.write_text(text, encoding="utf-8")
    folder.people.write_text(PEOPLE_HEAD + write_toml(people), encoding="utf-8")
    for trainer in folder.trainers:
        if rules:
            (trainer / LEARNER).write_text(rules, encoding="utf-8")
        if base is not None:
            lay_base(base_folder(base, "base"), trainer / FOLDER, run)
    _lay_capsules(folder, terms)
    folder.config.write_text(_config(folder, run, corpora), encoding="utf-8")
    if base is not None and not is_text:
        remark("one task goes through chat template, tokenizer, engine and reward ...")
        try_run(run, folder.trainers[0], str(folder.data))
    write_edition(run, folder.owner, folder.document, digest_of(folder.draft))
    return run


PEOPLE_HEAD: Final = "# Who is in the run. shoal run start signs it, as it does draft.toml.\n"


def renew(folder: RunFolder) -> str:
    """Sign the draft of a folder as the next edition if it was changed since the last edition,
    or if that edition ends within a day.

    Returns:
        A sentence that says so; empty if nothing was signed.

    Raises:
        ConfigError: The draft is invalid, or is another run's.
    """
    if not (folder.draft.exists() and folder.owner.exists() and folder.document.exists()):
        return ""  # the owner's files may be on another machine
    run, digest = load_run(folder.document), digest_of(folder.draft)
    now = time.time()  # noqa: TID251 - a tool for people, outside any node
    ends = run.expiry < now + DAY
    if digest == draft_of(run, folder.owner, folder.document) and not ends:
        return ""
    where = str(folder.draft)
    terms = read_draft(load_draft(folder.draft), where, now, folder.path)
    if terms.name != run.name:
        raise ConfigError(
            f"{where} is of a run {terms.name!r}, and {folder.path} holds {run.name!r}: write"
            " that name, or make another folder with shoal run init"
        )
    if terms.model.digest != run.terms.model.digest:
        raise ConfigError(
            f"{where} names another model than the one that {folder.path} trains: write that"
            " one, or make another folder with shoal run init"
        )
    was = replace(run.terms, epoch=terms.epoch, expiry=terms.expiry)
    changed = [one.name for one in fields(Terms) if getattr(was, one.name) !=
               getattr(terms, one.name)]  # fmt: skip
    if not changed and not ends:  # a comment was
        write_edition(run, folder.owner, folder.document, digest)
        return ""
    check_calibrated(terms)
    check_environments(terms, data_files(load_draft(folder.draft), folder.path))
    _lay_capsules(folder, terms)
    owner = load_or_create_key(folder.owner)
    terms = replace(terms, epoch=run.epoch + 1)
    edition = sign_edition(terms, owner, folder.owner, folder.document, is_next=True)
    write_edition(edition, folder.owner, folder.document, digest)
    why = f"was changed ({', '.join(changed)})" if changed else "would be void within a day"
    return f"{folder.draft.name} {why}: signed as epoch {edition.epoch}"


def _lay_capsules(folder: RunFolder, terms: Terms) -> None:
    """Put the capsules into the folder from which the trainer adds files to its policies."""
    for pin in terms.environments:
        if pin.is_capsule and pin.data is not None:
            for trainer in folder.trainers:
                link_files(folder.data, trainer / FOLDER, [pin.data.name])


def _copy_data(folder: RunFolder, files: Iterable[Path], questions: Sequence[Path]) -> None:
    """Copy the environments' files to the folder, with ``questions`` in Parquet or chats
    converted to JSON lines. The run pins the copies, since the originals may be edited later.
    """
    taken: dict[Path, Path] = {}
    for file in files:
        if file.exists() and not file.is_file():  # a device has no end
            raise ConfigError(f"{file} is no regular file")
        try:
            is_foreign = file in questions and is_other_form(file, ("question", "gold"))
            copy = folder.data / (f"{file.stem}.jsonl" if is_foreign else file.name)
            if taken.setdefault(copy, file) != file:
                raise ConfigError(f"{taken[copy]} and {file} have one name: rename one of them")
            folder.data.mkdir(exist_ok=True)
            if is_foreign:
                convert(file, copy, as_question, MAX_DATA)
            else:
                shutil.copyfile(file, copy)
        except shutil.SameFileError:
            continue
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def _converted(corpora: Mapping[str, Path], folder: RunFolder) -> Mapping[str, Path]:
    """Return the path of each corpus, after converting Parquet and chats to JSON lines."""
    places = dict(corpora)
    for name, place in corpora.items():
        if is_other_form(place, ("text",)):
            folder.data.mkdir(parents=True, exist_ok=True)
            places[name] = folder.data / f"{name}.jsonl"
            convert(place, places[name], as_text)
    return places


def _learner(folder: RunFolder, terms: Terms, text: str) -> str:
    """Return the text of the trainer's ``learner.toml``, checked as a trainer checks it.

    Raises:
        ConfigError: The trainer would not take it.
    """
    model, where = terms.model, str(folder.learner)
    if text:
        read_learner(parse_toml(text.encode(), where), where, terms.name, model)
        return text
    kind = kind_of(model.shape.parameters, has_base=bool(model.base))
    head = f"# How the trainer learns: edit, and start it again. For {kind.name}:\n"
    rules = write_learner(replace(kind.learner, run=terms.name), kind.reasons)
    return f"{head}# {kind.source}\n{rules}"


def _config(folder: RunFolder, run: Run, corpora: Mapping[str, Path]) -> str:
    """Return the configuration for all nodes of the folder: each reads the table of its own
    role.
    """
    every = 10 if run.terms.model.base else 1
    takes = any(pin.is_capsule for pin in run.terms.environments)
    lines = [
        *(["accept_capsules = true  # what its owner made runs in wasm", ""] if takes else []),
        "# Where each node has a machine for itself, threads = 0 takes all cores less one.",
        "[role.trainer]",
        "threads = 1",
    ]
    if run.terms.algorithm is Algorithm.DILOCO:
        texts = {name: str(path) for name, path in corpora.items()}
        exports = max(1, run.terms.diloco.outer_steps // EXPORTS)
        lines += ["", "[role.trainer.corpora]", "# Where this machine has the text."]
        lines += write_toml(texts).splitlines() if texts else []
        lines += ["", "[role.trainer.diloco]",
                  f"{f'export_every = {exports}':<32}# rounds, to diloco/export"]  # fmt: skip
        return "\n".join(lines) + "\n"
    lines.append(
        f"{f'checkpoint_every = {every}':<32}# steps taken again, at most, after a crash"
    )
    lines += ["", "[role.validator]", "threads = 1", "", "[role.inference]", "threads = 1"]
    if folder.data.exists():
        for role in (TRAINER, VALIDATOR, INFERENCE):
            lines += [
                "",
                f"[role.{role}.machine]",
                f"environment_data = {json.dumps(str(folder.data))}",
            ]
    return "\n".join(lines) + "\n"


def describe(folder: RunFolder, run: Run) -> Iterator[str]:
    """Yield the lines that describe the new run and the next steps."""
    model = run.terms.model
    kind = kind_of(model.shape.parameters, has_base=bool(model.base))
    tasks = ", ".join(pin.name for pin in run.terms.environments)
    diloco = run.terms.diloco if run.terms.algorithm is Algorithm.DILOCO else None
    drawn = "drawn from a seed, a token is a byte"
    what = kind.name if diloco is None or model.base else drawn
    yield f"run      {run.name}, id {run.id.hex()[:16]}"
    yield f"model    {model.shape.parameters:,} parameters: {what}"
    yield f"tasks    {tasks}" if tasks else f"text     {', '.join(run.terms.diloco.corpora)}"
    if diloco is not None:
        yield (
            f"recipe   {diloco.outer_steps} rounds of {diloco.inner_steps} steps at a rate of"
            f" {diloco.rate:g}"
        )
    else:
        yield f"recipe   {run.terms.sampling.steps} steps at a rate of {kind.learner.rate:g}"
    yield f"draft    {folder.draft}: shoal run start signs what you change in it"
    if folder.learner.exists():
        yield f"learner  {folder.learner}: rate, algorithm, evaluation; no one signs it"
    yield f"owner    {folder.owner}: whoever has it owns the run; no node needs it"
    yield ""
    yield f"next     shoal run start {folder.path}"
    yield "         plays all nodes on this machine. Each by itself, the first one first:"
    yield ""
    yield from start_lines(folder, run)
    yield ""
    yield "         On other machines: copy the node's folder there, with node.toml, and write"
    yield "         the first one's address for 127.0.0.1."


def start_lines(folder: RunFolder, run: Run) -> Iterator[str]:
    """Yield the command of each node."""
    trainer = run.terms.trainers[0]
    tried = range(PORT, PORT + PORTS)
    port = next((one for one in tried if not try_port(one)), PORT)
    for name, role in folder.cast().items():
        line = f"shoal node --role {role} --data {folder.node(name)} --config {folder.config}"
        if name == next(iter(folder.cast())):
            yield f"{line} --run {folder.document} --listen /ip4/0.0.0.0/tcp/{port}"
        else:
            yield f"{line} --bootstrap /ip4/127.0.0.1/tcp/{port}/p2p/{trainer}"
