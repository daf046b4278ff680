"""A folder's tokenizer, tried in a process of its own before a person's process opens it.

`tokenizers` asks for whatever memory a ``tokenizer.json`` names, and where there is none Rust
ends its process: a file of a few hundred bytes takes a command line down with a page of
addresses, and no handler sees it. A run's nodes open tokenizers in the environment's process
(`roles.envs.worker`); commands of people try them here first, in the same sandbox where this
machine has one, and say in a sentence what became of it.
"""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from p2p.errors import ShoalError
from p2p.sandbox import Confinement
from p2p.sandbox.entry import READY
from p2p.sandbox.launch import find_containment, launch
from roles.models.errors import BadModel

MODULE: Final = "roles.models.trial"
"""Name of this module, as ``python -m`` runs it."""
MEMORY: Final = 4 * 1024**3
"""Bytes of address space, as environments have (`roles.envs.base.Ration`): a tokenizer of
128,256 tokens takes 0.6 GB."""
SECONDS: Final = 60
"""Seconds of CPU: 0.14 for 49,152 tokens, 2 for the largest files that are read."""
PATIENCE: Final = 600.0
"""Seconds on the wall: ten times that, for machines that do something else."""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """Facts about a folder's tokenizer and chat template that commands need."""

    vocabulary: int
    """Every token's id is below."""
    has_template: bool
    end_tokens: Mapping[str, Sequence[int]]
    """End tokens by their source (see `roles.models.tokenizer.Tokenizer.end_tokens`)."""
    line_ends: Sequence[int]
    """Tokens of line breaks (see `roles.models.tokenizer.Tokenizer.line_ends`)."""
    prompts: Sequence[Sequence[int]]
    """The tokens of each question that was given, in its conversation."""
    answers: Sequence[Sequence[int]]
    """Tokens of each question's answer, in its place."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The words of one side in a conversation."""

    role: str
    content: str


Question = tuple[Sequence[tuple[str, str]], str, str]
"""A conversation (roles and words), how the assistant's words begin, and how they go on."""


def try_tokenizer(
    folder: Path, end_tokens: Sequence[int], questions: Sequence[Question] = ()
) -> TokenizerFacts:
    """Open the folder's tokenizer and template, and return their facts. Raises `BadModel`
    unless they can be opened here and have all of ``end_tokens``; `MissingDependency` without
    the packages for it. ``questions`` are put into its words."""
    importlib.import_module("roles.models.tokenizer")
    nowhere = "/nowhere"  # no node's folder has to be hidden
    confined = Confinement(readable=_places(folder), memory=MEMORY)
    start = launch([MODULE], confined, find_containment(nowhere), folder=nowhere)
    try:
        done = subprocess.run(
            start.command,
            env=dict(start.variables),
            input=json.dumps([str(folder.absolute()), list(end_tokens), questions, SECONDS]),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BadModel(f"{folder / 'tokenizer.json'} was not read in {PATIENCE:g} s") from None
    said = done.stdout.removeprefix(READY.decode()).strip()
    if done.returncode == 0:
        return TokenizerFacts(**json.loads(said))
    raise BadModel(
        said
        or f"{folder / 'tokenizer.json'} ends the process that reads it, or the chat template"
        f" does (exit {done.returncode}; it may use {SECONDS} s of CPU and {MEMORY:,} bytes):"
        " get the model again, from where it was first published"
    )


def facts_of(
    folder: Path, end_tokens: Sequence[int], questions: Sequence[Question] = ()
) -> TokenizerFacts:
    """Return the facts about a tokenizer, like `try_tokenizer`, but in this process."""
    from roles.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(folder)
    tokenizer.require(end_tokens)
    return TokenizerFacts(
        vocabulary=tokenizer.vocabulary,
        has_template=tokenizer.has_template,
        end_tokens=tokenizer.end_tokens(),
        line_ends=tokenizer.line_ends(),
        prompts=[tokenizer.chat([Turn(*turn) for turn in said]) for said, *_ in questions],
        answers=[tokenizer.encode_behind(*texts) for _, *texts in questions],
    )


def _places(folder: Path) -> tuple[str, ...]:
    """Return the folder, and the files that its links lead to: Hugging Face's cache has only
    links.
    """
    links = [path.resolve() for path in folder.glob("*") if path.is_symlink()]
    return tuple(map(str, (folder.absolute(), *filter(Path.is_file, links))))


def main() -> int:
    """Try the folder that standard input names, and print its facts or an error. Return the
    exit code."""
    folder, end_tokens, questions, seconds = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        facts = facts_of(Path(folder), end_tokens, questions)
    except ShoalError as error:
        print(to_ascii(str(error)))  # noqa: T201 - this is the result
        return 1
    except OSError as error:
        said = f"{error.filename} cannot be read in a sandbox: {error.strerror}"
        print(to_ascii(said))  # noqa: T201 - this is the result
        return 1
    print(json.dumps(asdict(facts)))  # noqa: T201 - this is the result
    return 0


def to_ascii(text: str) -> str:
    """Return text that any terminal can show: names in a stranger's file may have characters
    without an encoding."""
    return text.encode("ascii", "backslashreplace").decode()


if __name__ == "__main__":
    sys.exit(main())
