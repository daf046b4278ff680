"""The parts of a run that pre-trains on text: its corpora, a recipe, a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from p2p.errors import ConfigError
from p2p.node.tables import write_table, write_toml
from p2p.node.usage import expanded, patience
from roles.contract.core.diloco import DilocoTerms
from roles.contract.core.file import Terms
from roles.diloco.corpus import PYTHON, TextCodec, Windows, open_corpora
from roles.models.bundle import read_config
from roles.models.ends import need_end_tokens
from roles.models.fetch import MODELS, base_folder
from roles.own.draft import HEAD, Plan, Source, without_defaults
from roles.rl.recipes import SORTER

SHAPE: Final = replace(SORTER, vocabulary=256, tied=True)
"""115,072 weights; a token is a byte."""
TERMS: Final = DilocoTerms(
    outer_steps=30,
    inner_steps=100,
    sequences=4,
    window=256,
    warmup=150,
    outer_rate=0.9,
    outer_momentum=0.5,
)
"""Terms for a network without a base."""
CONTINUED: Final = replace(
    TERMS, outer_steps=10, inner_steps=20, warmup=20, rate=1e-4,
    held_out=32,
)  # fmt: skip
"""Terms for a model that has learnt before, at a rate that keeps its knowledge. Not
measured.
"""
HELD_OUT: Final = 20
"""One of this many windows of the text is held out, up to `DilocoTerms.held_out`."""
EXPORTS: Final = 10
"""Exports of a run, with a sample each."""

REASONS: Final[Mapping[str, str]] = {
    "days": "until it must be renewed",
    "model.context": "tokens that it sees at once",
    "model.end_tokens": "the first ends each document",
    "model.dtype": "of the weights; each trainer's [role.trainer] may compute in less",
    "diloco.outer_steps": "rounds; over the last fifth of all steps the rate falls to zero",
    "diloco.inner_steps": "of a trainer by itself, between two exchanges",
    "diloco.round_seconds": "1200: slow trainers stop then, and count by their tokens",
    "diloco.sequences": "windows of text a step",
    "diloco.window": "tokens of a window",
    "diloco.rate": "of AdamW at its peak",
    "diloco.warmup": "steps until that",
    "diloco.codec": "of what travels; int8 or fp32 are larger",
    "diloco.held_out": "windows on which the loss is measured, and nobody trains",
    "diloco.joining": '"admitted": all that [admission] lets in may join',
}
"""Comments of a draft; docs/recipe.md has the other keys."""


def read_corpora(texts: Sequence[str]) -> dict[str, Path]:
    """Return the path of each corpus that ``PATH`` or ``NAME=PATH`` means.

    Raises:
        ConfigError: Two files have one name.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or "/" in name:
            name, path = "", text
        place = expanded(Path(path)).absolute()
        name = name or "".join(sign for sign in place.stem if sign.isprintable())
        if found.setdefault(name, place) != place:
            raise ConfigError(
                f"{found[name]} and {place} have one name: call one --corpus NAME={place}"
            )
    return found


def write_pretraining(plan: Plan) -> str:
    """Return the text of a draft, with comments.

    Raises:
        ConfigError: A corpus cannot be learnt from.
    """
    folder = base_folder(plan.model, "--model") if plan.model else None
    model: dict[str, object]
    if folder is None:
        terms, shape, end = TERMS, SHAPE, 0
        model = {"seed": 0, "context": terms.window, "end_tokens": [0],
                 "shape": without_defaults(SHAPE)}  # fmt: skip
    else:
        config = read_config(folder)
        terms, shape, ends = CONTINUED, config.shape, need_end_tokens(folder, config).tokens
        end = ends[0]
        model = {
            "base": plan.model if plan.model in MODELS else str(folder.absolute()),
            "dtype": "float32",
            "end_tokens": list(ends),
        }
    places = {one.name: one.file for one in plan.sources if one.file is not None}
    sizes = {}
    for source in plan.sources or (Source(PYTHON),):
        with patience(f"reading {places.get(source.name, source.name)} ..."):
            opened = open_corpora(
                {source.name: 1.0}, {name: str(place) for name, place in places.items()},
                TextCodec(folder).encode, end=end, vocabulary=shape.vocabulary,
                window=terms.window, held_out=1,
            )  # fmt: skip
        sizes[source.name] = opened.tokens.size // opened.width
    whole = sum(sizes.values())
    held = max(len(sizes), min(terms.held_out, len(sizes) * min(sizes.values()) // HELD_OUT))
    shares = {name: round(max(size / whole, 0.01), 2) for name, size in sizes.items()}
    terms = replace(terms, corpora=shares, held_out=held)
    usual = write_table(DilocoTerms())
    told = {key: value for key, value in write_table(terms).items() if value != usual[key]}
    said = [key.partition(".")[2] for key in REASONS if key.startswith("diloco.")]
    table: dict[str, object] = {
        "name": plan.name,
        "days": 30,
        "algorithm": "diloco",
        "admission": {"mode": "open"},
        "model": model,
        "diloco": {**{key: usual[key] for key in said}, **told},
    }
    return HEAD + write_toml(table, REASONS)


def open_text(terms: Terms, base: Path | None, places: Mapping[str, str]) -> Windows:
    """Return the text that a trainer of a run would learn from.

    Raises:
        ConfigError: The trainer could not.
    """
    diloco, model = terms.diloco, terms.model
    named = diloco.corpora.keys() | diloco.anneal.keys()
    if lacking := sorted(named - places.keys() - {PYTHON}):
        raise ConfigError(
            f"the draft learns from the corpus {lacking[0]!r}: say where it lies, with --corpus"
            f" {lacking[0]}=PATH"
        )
    if unread := sorted(places.keys() - named):
        raise ConfigError(
            f"the draft does not learn from {unread[0]!r}: its corpora are"
            f" {', '.join(sorted(named))}"
        )
    return open_corpora(
        diloco.corpora, places, TextCodec(base).encode, end=model.end_tokens[0],
        vocabulary=model.shape.vocabulary, window=diloco.window, held_out=diloco.held_out,
        anneal=diloco.anneal,
    )  # fmt: skip
