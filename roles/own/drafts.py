"""The draft of a run of one's own: written with the recipe that fits, or completed.

The text is for people: each number has its reason beside it. `roles.own.draft` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from p2p.errors import ConfigError
from p2p.identity import PeerId
from p2p.node.tables import write_table
from p2p.node.usage import did_you_mean, expanded, remark
from roles.contract.core.sampling import SamplingTerms
from roles.models.bundle import read_config
from roles.models.ends import need_end_tokens
from roles.models.fetch import MODELS, base_folder
from roles.rl.recipes import (
    ANSWER_TOKENS,
    NETWORK,
    OTHER_ANSWER_TOKENS,
    SMALL_MODEL,
    TRAINED,
    ModelKind,
    kind_of,
)

ONE_LINE: Final = ("arithmetic",)
"""Environments whose answer is one line, begun for the model: a newline ends it, too."""
NUMBERS: Final = "sort"
"""The environment of models without a base: its tasks are numbers, not text."""
COLUMN: Final = 32
"""Where comments begin."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the tasks of an environment come from."""

    name: str
    file: Path | None = None
    """Its questions, for those that read some."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a draft is written from."""

    name: str
    model: str = ""
    """As ``--model``; empty: a network without a base."""
    sources: tuple[Source, ...] = ()


def read_source(text: str) -> Source:
    """``NAME`` or ``NAME=FILE``."""
    name, _, file = text.partition("=")
    return Source(name, expanded(Path(file)) if file else None)


def write_draft(plan: Plan) -> str:
    """A whole draft, but for the ids of trainers and validators. Raises `ConfigError`."""
    folder = base_folder(plan.model, "--model") if plan.model else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"--model {plan.model}: there is no such folder, and of the models that can be"
            f" fetched {did_you_mean(plan.model, MODELS)}"
        )
    sources = plan.sources or (Source("arithmetic" if folder else NUMBERS),)
    _check(folder, sources)
    if folder is None:
        kind, model = NETWORK, "seed = 0\nend_tokens = [0]\n"
    else:
        kind, model = _describe(plan.model, folder, sources)
    lines = [
        f"name = {json.dumps(plan.name)}",
        _line("epoch = 1", "count it up to replace this edition by another"),
        _line("days = 30", "until it must be renewed"),
        "",
        "[admission]",
        _line('mode = "open"', 'or "allow", with allowed = [ids]'),
        "",
        *(line for source in sources for line in _environment(source, kind)),
        "[model]",
        model,
        *_sampling(fit(kind, [source.name for source in sources]), kind),
        "",
        "[limits]",
        _line('preset = "fp32"', "what validators let pass: honest errors are rounding errors"),
    ]
    if folder is None:
        lines += ["", "[delivery]", _line("chunk_bytes = 32768", "a policy has 0.4 MB")]
    return "\n".join(lines) + "\n"


def fit(kind: ModelKind, environments: Sequence[str]) -> SamplingTerms:
    """The recipe of a kind, with room for the longest answer of these environments."""
    if kind is not SMALL_MODEL:
        return kind.sampling
    longest = max(ANSWER_TOKENS.get(name, OTHER_ANSWER_TOKENS) for name in environments)
    return replace(kind.sampling, max_new_tokens=longest)


def complete(text: str, table: Mapping[str, object], where: Path) -> str:
    """A draft of somebody's, whose files of questions are named from here on by their whole
    path. Raises `ConfigError`."""
    for key in ("trainers", "validators"):
        if key in table:
            raise ConfigError(
                f"{where} names {key} already, and init makes new ones: remove that line, or"
                " sign it as it is with shoal run create"
            )
    for file in files_of(table):
        written, whole = json.dumps(file), (where.parent / expanded(Path(file))).absolute()
        if written not in text:
            raise ConfigError(f'{where}: write data = {written}, in one piece and "quoted"')
        text = text.replace(written, json.dumps(str(whole)))
    return text


def files_of(table: Mapping[str, object]) -> list[str]:
    """The files of questions that a draft names."""
    environments = table.get("environments")
    return [
        one["data"]
        for one in (environments if isinstance(environments, list) else [])
        if isinstance(one, dict) and isinstance(one.get("data"), str)
    ]


def with_ids(text: str, folder: Path, trainer: PeerId, validator: PeerId) -> str:
    """The draft with its officers, which stand before the first table."""
    return (
        "# Change what you like, count epoch up, and sign it again:\n"
        f"#   shoal run create {folder / 'draft.toml'} --key {folder / 'owner.key'}"
        f" --out {folder / 'run.shoal'}\n"
        f'trainers = ["{trainer}"]\nvalidators = ["{validator}"]\n{text}'
    )


def _check(folder: Path | None, sources: Sequence[Source]) -> None:
    names = [source.name for source in sources]
    if folder is None and names != [NUMBERS]:
        raise ConfigError(
            f"{', '.join(names)} asks in words, which needs a model that reads: add --model"
            f" smollm2 (shoal models fetch smollm2 makes it), or the folder of another"
        )
    if folder is not None and NUMBERS in names:
        raise ConfigError(
            f"{NUMBERS} is for the network that is drawn from a seed: leave out --model, or"
            " take --env arithmetic"
        )


def _describe(name: str, folder: Path, sources: Sequence[Source]) -> tuple[ModelKind, str]:
    """The kind of a base, and its table."""
    config = read_config(folder)
    found = need_end_tokens(folder, config)
    for note in found.notes:
        remark(f"{folder}: {note}")
    ends = found.of_line if all(one.name in ONE_LINE for one in sources) else found.tokens
    base = name if name in MODELS else str(folder.absolute())
    lines = [
        *(f"# {note}" for note in (*config.notes, *found.notes)),
        f"base = {json.dumps(base)}",
        _line('dtype = "float32"', "sampled and scored in; bfloat16 wants limits of its own"),
        _line(f"end_tokens = {list(ends)}", "any of them ends an answer"),
        "",
    ]
    return kind_of(config.shape.parameters, has_base=True), "\n".join(lines)


def _environment(source: Source, kind: ModelKind) -> Iterator[str]:
    yield "[[environments]]"
    yield f"name = {json.dumps(source.name)}"
    yield _line("weight = 1.0", "how many tasks come from it, beside the others")
    if source.file is not None:
        yield _line(f"data = {json.dumps(str(source.file.absolute()))}", "every node needs it")
    if kind is SMALL_MODEL and source.name in TRAINED:
        mix = ", ".join(f"{name} = {weight}" for name, weight in TRAINED[source.name].items())
        yield f"kinds = {{ {mix} }}"
    yield ""


def _sampling(sampling: SamplingTerms, kind: ModelKind) -> Iterator[str]:
    yield _line("[sampling]", "what nodes must agree on; the rest is in learner.toml")
    for name, value in write_table(sampling).items():
        yield _line(f"{name} = {_number(value)}", kind.reasons.get(name, ""))


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) and value < 0.01 else str(value)


def _line(text: str, reason: str) -> str:
    return f"{text:<{COLUMN - 1}} # {reason}" if reason else text
