"""The draft of a run, which its owner writes, and its conversion to terms.

A draft is the TOML form of `Terms`. What can be found out may be left out: the digests of
environments and files, shape and context of a base, numbers of limits, the day of expiry. The
ids of trainers and validators may lie beside the draft, in ``people.toml``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from p2p.errors import ConfigError
from p2p.node.tables import Table, load_toml, read_table, write_table, write_toml
from p2p.node.usage import did_you_mean, expanded, remark
from proofs.checks import Limits
from roles.contract.core.diloco import Algorithm, Goal
from roles.contract.core.file import EnvironmentPin, Terms
from roles.contract.core.names import CAPSULES
from roles.contract.core.pin import CAPSULE_SUFFIX
from roles.contract.core.sampling import NO_SAMPLING, SamplingTerms
from roles.contract.core.shape import Dtype, ModelShape
from roles.envs.base import environment_digest, find_environment, is_ours, make_environment
from roles.envs.check import SAMPLE, check_rewards, why_not_repeatable
from roles.envs.data import pin_data, read_data
from roles.envs.examine import examine
from roles.envs.text import is_text
from roles.models.bundle import check_weights, pin_folder, read_config
from roles.models.ends import need_end_tokens
from roles.models.fetch import MODELS, base_folder
from roles.own.layout import PEOPLE
from roles.rl.learner import FILE as LEARNER, KEYS
from roles.rl.recipes import (
    ANSWER_TOKENS,
    NETWORK,
    OTHER_ANSWER_TOKENS,
    OTHER_TURNS,
    SMALL_MODEL,
    SORTER,
    TRAINED,
    TURNS,
    ModelKind,
    kind_of,
)

DAY: Final = 24 * 3600
"""Seconds of a day."""
DAYS: Final = 30.0
"""Default validity of a draft in days: nodes that hear of no later edition stop by then."""
MAX_DAYS: Final = 3650.0
"""Longest validity in days: after ten years the keys of a signature are no longer to be
trusted.
"""
ONE_LINE: Final = ("arithmetic",)
"""Environments whose answer is one line, begun for the model: a newline ends it, too."""
DRAWN_TASKS: Final = 8
"""Tasks of each environment that tell how long right answers are."""
NUMBERS: Final = ("sort", "guess")
"""The environments of models without a base: their tasks are numbers, not text."""


def load_draft(path: Path) -> dict[str, object]:
    """Return the table of a draft, with that of ``people.toml`` beside it.

    Raises:
        ConfigError: A file cannot be read.
    """
    table, people = load_toml(path), path.with_name(PEOPLE)
    others = load_toml(people) if people.exists() else {}
    try:
        return with_people(table, others)
    except ConfigError as error:
        raise ConfigError(
            f"{error} stands in {path} and in {people}: remove it from one"
        ) from None


def with_people(table: Table, people: Table, prefix: str = "") -> dict[str, object]:
    """Return the keys of both tables and of the tables in them.

    Raises:
        ConfigError: A key is in both. The message names it.
    """
    joined = dict(table)
    for key, value in people.items():
        mine = joined.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            joined[key] = with_people(mine, value, f"{prefix}{key}.")
        elif key in joined:
            raise ConfigError(f"{prefix}{key}")
        else:
            joined[key] = value
    return joined


def digest_of(path: Path) -> str:
    """Return the digest of a draft with ``people.toml`` and its files of questions.

    Raises:
        ConfigError: A file cannot be read.
    """
    pins = [pin_data(str(file)) for file in data_files(load_draft(path), path.parent)]
    texts = [one.read_bytes() for one in (path, path.with_name(PEOPLE)) if one.exists()]
    parts = [hashlib.sha256(text).digest() for text in texts] + [pin.digest for pin in pins]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def read_draft(table: Table, where: str, now: float, folder: Path = Path()) -> Terms:
    """Convert a draft to the terms of a run.

    Args:
        table: Table of the draft.
        where: File of the draft, which begins every error.
        now: Wall time.
        folder: Folder of the draft, from which its files of questions are named.

    Raises:
        ConfigError: Something is wrong; the sentence names the key.
    """
    _check_places(table, where)
    terms = dict(table)
    days = terms.pop("days", DAYS)
    if not isinstance(days, int | float) or not 0 < days <= MAX_DAYS:
        raise ConfigError(
            f"{where}: days must be more than 0 and at most {MAX_DAYS:g}, not {days!r:.40}"
        )
    terms.setdefault("expiry", int(now + days * DAY))
    terms.setdefault("validators", [])
    if not _draws_answers(terms):
        terms |= {"environments": [], "sampling": write_table(NO_SAMPLING)}
    terms["environments"] = [
        write_table(_pinned(one, f"{where}: environments[{number}]", folder))
        for number, one in enumerate(_environments(terms))
    ]
    if "base" in (model := _table(terms, "model", where)):
        terms["model"] = model = _based(model, f"{where}: model")
    terms["limits"] = _limits(terms, model.get("dtype"), f"{where}: limits")
    if (calibration := terms.get("calibration")) is not None:
        terms["calibration"] = _calibration(calibration, f"{where}: calibration")
    return read_table(Terms, terms, where)


def _check_places(table: Table, where: str) -> None:
    """Check that the draft has no key that only the trainer decides.

    Raises:
        ConfigError: It has one.
    """
    if "recipe" in table:
        raise ConfigError(
            f"{where}: [recipe] is of an older Shoal: the keys {', '.join(_SIGNED)} go to"
            f" [sampling], the others to the trainer's {LEARNER}"
        )
    parts = [one for name, one in table.items() if name in _BARE and isinstance(one, Mapping)]
    for key in (*table, *(key for part in parts for key in part)):
        if key in KEYS:
            raise ConfigError(
                f"{where}: {key} belongs in {LEARNER}, in the trainer's data folder: only the"
                " trainer needs it, and nothing is signed again when it changes"
            )
    algorithm = table.get("algorithm", Algorithm.GRPO.value)
    if algorithm not in [one.value for one in Algorithm]:
        raise ConfigError(
            f"{where}: algorithm must be one of {', '.join(one.value for one in Algorithm)};"
            f" how a trainer learns from rollouts is named in its {LEARNER}"
        )
    known = sorted(("days", *(one.name for one in fields(Terms))))
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: there is no key {key!r}; {did_you_mean(key, known)}")


_BARE: Final = ("model", "sampling", "delivery", "limits", "trust", "admission")
"""Tables in which a key of the learner may stand by mistake: none has one of that name."""
_SIGNED: Final = tuple(one.name for one in fields(SamplingTerms))


def _table(table: Table, key: str, where: str) -> Mapping[str, object]:
    found = table.get(key, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: {key} must be a table")
    return found


def _draws_answers(table: Table) -> bool:
    """Return True if the run's trainers learn from what environments pay."""
    diloco = table.get("diloco")
    goal = diloco.get("goal") if isinstance(diloco, Mapping) else None
    return table.get("algorithm") != Algorithm.DILOCO.value or goal == Goal.REWARD.value


def _environments(table: Table) -> list[dict[str, object]]:
    """Return the table of each environment, of which a draft may have the name only."""
    found = table.get("environments", ())
    if not isinstance(found, list | tuple):
        return []
    return [{"name": one} if isinstance(one, str) else one for one in found]


def data_files(table: Table, folder: Path, of: Sequence[object] = ()) -> list[Path]:
    """Return the files that a draft in ``folder`` names for its environments, or for those
    ``of`` some names."""
    found = [one for one in _environments(table) if isinstance(one, Mapping)]
    named = [one.get("data") for one in found if not of or one.get("name") in of]
    return [data_file(one, folder) for one in named if isinstance(one, str) and one]


def data_file(named: str, folder: Path) -> Path:
    """Return the file that a draft in ``folder`` names: the one in ``data/``, where ``shoal run
    init`` puts copies and JSON lines, or else the path as written."""
    copy = folder / "data" / Path(named).name
    there = (one for one in (copy, copy.parent / f"{copy.stem}.jsonl") if one.exists())
    return next(there, folder / expanded(Path(named)))


def _pinned(table: object, where: str, folder: Path) -> EnvironmentPin:
    """Return the run file's entry for an environment.

    Raises:
        ConfigError: A file cannot be read, or the environment lacks a kind, so no node could
            open it.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a name or a table")
    filled = dict(table)
    if isinstance(filled.get("name"), str):
        filled.setdefault("digest", environment_digest(str(filled["name"])))
    if isinstance(named := filled.get("data"), str):
        file = data_file(named, folder) if named else None
        filled["data"] = file and write_table(pin_data(str(file)))
    pin = read_table(EnvironmentPin, filled, where)
    if pin.kinds:
        _make(pin, data_file(str(table.get("data", "")), folder))
    return pin


def _make(pin: EnvironmentPin, file: Path) -> Any:
    options: dict[str, object] = {"kinds": dict(pin.kinds)} if pin.kinds else {}
    if pin.data is not None:
        options["data"] = read_data(pin.data, str(file.parent))
    return make_environment(pin.name, **options)


def check_environments(terms: Terms, files: Iterable[Path]) -> None:
    """Make the environments of a run, and try them as ``shoal envs check`` does.

    Args:
        terms: Terms of the run.
        files: Files that the environments read.

    Raises:
        ConfigError: An environment cannot be made, its file has bad lines, or it has a fault:
            no node could use it.
    """
    places = {file.name: file for file in files}
    for pin in terms.environments:
        file = places[pin.data.name] if pin.data is not None else None
        environment = _make(pin, file or Path())
        if why := why_not_repeatable(environment):
            raise ConfigError(why)
        if is_ours(pin.name):
            continue
        faults = examine(pin.name, file, pin.kinds)
        if is_text(environment):
            faults += check_rewards(environment, environment.evaluation()[:SAMPLE]).faults
        if faults:
            raise ConfigError(
                f"the environment {pin.name!r} is not sound: {faults[0]} (shoal envs check"
                f" {pin.name} says all)"
            )


def _based(table: Mapping[str, object], where: str) -> dict[str, object]:
    """Return the table of a model with pins and values from the folder that ``base`` names."""
    base = table["base"]
    if not isinstance(base, str):
        raise ConfigError(f"{where}: base must be the path of a folder")
    if "shape" in table:
        raise ConfigError(f"{where}: shape is that of {base}: remove it")
    folder = base_folder(base, where)
    config = read_config(folder)
    check_weights(folder, config)
    read: dict[str, object] = {"context": config.context}
    notes = config.notes
    if "end_tokens" not in table:
        ends = need_end_tokens(folder, config)
        notes += ends.notes
        read["end_tokens"] = list(ends.tokens)
    for note in notes:
        remark(f"{folder}: {note}")
    pins = [write_table(pin) for pin in pin_folder(folder)]
    return {**read, **table, "base": pins, "shape": write_table(config.shape)}


def _limits(terms: Table, dtype: object, where: str) -> dict[str, object]:
    """Return the numbers of a preset, with the draft's changes.

    In bfloat16 the limits of float32 reject all honest work. Beside a calibration all are
    named: a preset is not what it measured.
    """
    table = dict(_table(terms, "limits", where))
    presets = {"fp32": Limits.fp32, "bf16": Limits.bf16}
    usual = "bf16" if dtype == Dtype.BFLOAT16.value else "fp32"
    name = table.pop("preset", usual)
    if not isinstance(name, str) or name not in presets:
        raise ConfigError(f"{where}: preset must be one of {', '.join(presets)}")
    missing = [one.name for one in fields(Limits) if one.name not in table]
    if terms.get("calibration") is not None and missing:
        raise ConfigError(
            f"{where}: {', '.join(missing)} would be the preset's, though the draft has a"
            " calibration: take the whole table [limits] that was written with it"
        )
    return {**write_table(presets[name]()), **table}


def _calibration(table: object, where: str) -> object:
    """Digests, which TOML has no type for, are written in hexadecimal."""
    if not isinstance(table, Mapping) or not isinstance(digest := table.get("model"), str):
        return table
    try:
        return {**table, "model": bytes.fromhex(digest)}
    except ValueError:
        raise ConfigError(f"{where}: model is no digest in hexadecimal") from None


def check_calibrated(terms: Terms) -> None:
    """Check that the limits were measured, if the run needs measured limits.

    In float32 honest errors are rounding errors, whatever the model, and the preset is
    measured. In bfloat16 they depend on model, task and engines.

    Raises:
        ConfigError: They were not.
    """
    if terms.model.dtype is Dtype.FLOAT32:
        return
    if terms.calibration is None:
        raise ConfigError(
            f"run {terms.name!r} computes in {terms.model.dtype.value}, and its limits were"
            " measured on no model: they may refuse honest work, or let an older policy"
            " through. Put the tables [limits] and [calibration] that shoal calibrate writes"
            " into the draft, or pass --uncalibrated"
        )
    played = {pin.name for pin in terms.environments}
    if not played <= terms.calibration.environments.keys():
        others = ", ".join(sorted(played - terms.calibration.environments.keys()))
        raise ConfigError(
            f"the limits of run {terms.name!r} were not measured on {others}: run shoal"
            " calibrate on this run's environments, or pass --uncalibrated"
        )


# A draft of one's own


@dataclass(frozen=True, slots=True)
class Source:
    """Source of the tasks of an environment, or of the text of a corpus."""

    name: str
    file: Path | None = None
    """File of the environment's questions, or of the corpus."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices from which a draft is written."""

    name: str
    model: str = ""
    """Value of ``--model``; empty: a network without a base."""
    sources: tuple[Source, ...] = ()
    """Environments, or the corpora of a run that pre-trains."""


def read_source(text: str) -> Source:
    """Return the source that ``NAME``, ``NAME=FILE`` or ``FILE.capsule`` means."""
    if text.endswith(CAPSULE_SUFFIX):
        return Source(*capsule(Path(text)))
    name, _, file = text.partition("=")
    return Source(name, expanded(Path(file)) if file else None)


def capsule(file: Path) -> tuple[str, Path]:
    """Return the name under which a run refers to a ``.capsule``, and its file."""
    return CAPSULES + file.name.removesuffix(CAPSULE_SUFFIX), expanded(file)


def write_draft(plan: Plan) -> str:
    """Return the text of a draft, with comments; ids of trainers and validators go to
    ``people.toml``.

    Raises:
        ConfigError: The plan makes no run.
    """
    folder = base_folder(plan.model, "--model") if plan.model else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"--model {plan.model}: there is no such folder, and of the models that can be"
            f" fetched {did_you_mean(plan.model, MODELS)}"
        )
    sources = plan.sources or (Source("arithmetic" if folder else NUMBERS[0]),)
    names = [source.name for source in sources]
    for name in names:
        find_environment(name)
    if folder is None and not set(names) <= set(NUMBERS):
        raise ConfigError(
            f"{', '.join(names)} asks in words, which needs a model that reads: add --model"
            f" smollm2 (shoal models fetch smollm2 makes it), or the folder of another"
        )
    if folder is not None and (numbers := set(names) & set(NUMBERS)):
        raise ConfigError(
            f"{min(numbers)} is for the network that is drawn from a seed: leave out --model,"
            " or take --env arithmetic"
        )
    notes: Sequence[str] = ()
    if folder is None:
        kind = NETWORK
        model = {"seed": 0, "end_tokens": [0], "shape": without_defaults(SORTER)}
    else:
        config = read_config(folder)
        found = need_end_tokens(folder, config)
        for note in found.notes:
            remark(f"{folder}: {note}")
        is_line = all(name in ONE_LINE for name in names)
        kind = kind_of(config.shape.parameters, has_base=True)
        notes = (*config.notes, *found.notes)
        if kind is SMALL_MODEL and not set(names) & set(ANSWER_TOKENS):
            _say_short_answers(sources)
        model = {
            "base": plan.model if plan.model in MODELS else str(folder.absolute()),
            "dtype": "float32",
            "end_tokens": list(found.of_line if is_line else found.tokens),
        }
    table: dict[str, object] = {
        "name": plan.name,
        "days": 30,
        "admission": {"mode": "open"},
        "environments": [_environment(source, kind) for source in sources],
        "model": model,
        "sampling": _one_turn_unsaid(fit(kind, names, any(map(_talks, sources)))),
        "limits": {"preset": "fp32"},
    }
    if folder is None:
        table["delivery"] = {"chunk_bytes": 32_768}
    head = [f"# How its trainer learns stands in {LEARNER}.", *(f"# {note}" for note in notes)]
    return HEAD + "\n".join(head) + "\n" + write_toml(table, REASONS)


HEAD: Final = f"""\
# What all nodes of the run agree on. Change it, and shoal run start signs it again.
# Who is in the run stands in {PEOPLE}.
"""


def without_defaults(shape: ModelShape) -> dict[str, object]:
    usual = {one.name: one.default for one in fields(shape)}
    return {key: value for key, value in write_table(shape).items() if value != usual[key]}


def _one_turn_unsaid(sampling: SamplingTerms) -> dict[str, object]:
    table, of_turns = write_table(sampling), () if sampling.turns > 1 else ("turns", "heard")
    return {key: table[key] for key in table if key not in of_turns}


REASONS: Final[Mapping[str, str]] = {
    "days": "until it must be renewed",
    "admission.mode": 'or "allow", with allowed = [ids]',
    "environments.weight": "how many tasks come from it, beside the others",
    "environments.data": "the copy in data/ counts; a node needs it, unless it is a capsule",
    "model.dtype": "sampled and scored in; bfloat16 wants limits of its own",
    "model.end_tokens": "any of them ends an answer",
    "sampling.steps": "each is a policy",
    "sampling.group_size": "answers to each task",
    "sampling.max_new_tokens": "an answer that is longer is cut, and wrong",
    "sampling.submission": "tasks that a node answers and hands in together",
    "sampling.lag": "oldest usable policy, in steps behind the trainer",
    "sampling.turns": "of an answer, at most; the environment speaks between them",
    "sampling.heard": "tokens that it may say in one answer",
    "sampling.proof_values": "of each 32 tokens, in the proof of an answer",
    "limits.preset": "what validators let pass: honest errors are rounding errors",
    "delivery.chunk_bytes": "a policy has 0.4 MB",
}
"""Comments of a draft."""


def _talks(source: Source) -> bool:
    return not is_ours(source.name) and hasattr(_made(source), "respond")


def _made(source: Source) -> Any:
    data = None if source.file is None else pin_data(str(source.file))
    pin = EnvironmentPin(name=source.name, digest=bytes(32), data=data)
    return _make(pin, source.file or Path())


def _say_short_answers(sources: Iterable[Source]) -> None:
    """Say how long right answers are, if they are much shorter than answers may be.

    A step takes as long as its longest answers, and a model that need not think gains nothing
    from the room.
    """
    environments = [_made(source) for source in sources]
    seeds = [number.to_bytes(4, "big") for number in range(DRAWN_TASKS)]
    tasks = [one.task(seed) for one in environments if is_text(one) for seed in seeds]
    longest = max((len(task.answer) for task in tasks), default=OTHER_ANSWER_TOKENS)
    if longest <= OTHER_ANSWER_TOKENS // 8:
        remark(
            f"an answer may have {OTHER_ANSWER_TOKENS} tokens, and right ones have"
            f" {longest} characters at most: unless the model should think first, write"
            " max_new_tokens = 32 in the draft (8 for one word), and every step is faster"
        )


def _environment(source: Source, kind: ModelKind) -> dict[str, object]:
    table: dict[str, object] = {"name": source.name, "weight": 1.0}
    if source.file is not None:
        table["data"] = str(source.file.absolute())
    if kind is SMALL_MODEL and source.name in TRAINED:
        table["kinds"] = dict(TRAINED[source.name])
    return table


def fit(kind: ModelKind, environments: Sequence[str], talks: bool = False) -> SamplingTerms:
    """Return the sampling for a kind of model, with room for these environments' answers.
    ``talks`` is True if a foreign environment answers the model."""
    spoken = [TURNS[name] for name in environments if name in TURNS] or [(1, 0)]
    spoken += [OTHER_TURNS] if talks else []
    turns, heard = max(spoken)[0], max(words for _, words in spoken)
    sampling = replace(kind.sampling, turns=turns, heard=heard)
    if kind is not SMALL_MODEL:
        return sampling
    longest = max(ANSWER_TOKENS.get(name, OTHER_ANSWER_TOKENS) for name in environments)
    return replace(sampling, max_new_tokens=longest)
