"""``shoal chat FOLDER`` and ``shoal sample FOLDER --prompt TEXT``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from p2p.errors import ConfigError
from p2p.node.usage import (
    BEGINS_AGAIN,
    CommandParser,
    complain,
    expanded,
    interruptible,
    patience,
    remark,
    say,
    tell,
    whole_number,
)
from roles.chat.find import Found, Models, find_models
from roles.models.errors import BadModel

if TYPE_CHECKING:
    from roles.chat.voice import Manner, Voice

HELP: Final = """\
/before   the model that the run began with answers your last question, and the next ones
/after    the trained model again
/reset    forget the conversation
/exit     end (or Ctrl-D)"""
MAX_TOKENS: Final = 32_768
NO_WORDS: Final = (
    "{} has no tokenizer, and with it no words: shoal eval {} shows what it answers to its own"
    " tasks"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """The words of one side in a conversation."""

    role: str
    content: str


def chat(argv: Sequence[str] | None = None) -> int:
    """Talk to the newest policy of a run, an export, or a model's folder."""
    parser = _parser("shoal chat", str(chat.__doc__))
    return interruptible(partial(_chat, parser.parse_args(argv)))


def sample(argv: Sequence[str] | None = None) -> int:
    """Print a model's answers to one prompt."""
    parser = _parser("shoal sample", str(sample.__doc__))
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="- reads standard input"
    )
    parser.add_argument(
        "--count", type=whole_number(1, 1024), default=1, metavar="N", help="answers (1)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return interruptible(partial(_sample, parser.parse_args(argv)), BEGINS_AGAIN)


def _parser(name: str, purpose: str) -> CommandParser:
    parser = CommandParser(prog=name, description=purpose)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a run, node or model")
    parser.add_argument(
        "--policy", type=whole_number(0, 2**53), metavar="N", help="of a run (the newest)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, default=0.7, metavar="T", help="0 to 10 (0.7)"
    )
    parser.add_argument(
        "--tokens", type=whole_number(1, MAX_TOKENS), default=512, metavar="N",
        help="most tokens of an answer (512)",
    )  # fmt: skip
    parser.add_argument("--seed", type=whole_number(0, 2**53), default=0, help="of draws (0)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N, mps (auto)")
    return parser


def _temperature(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0.0 <= number <= 10.0:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 10")
    return number


def _manner(options: argparse.Namespace) -> Manner:
    from roles.chat.voice import Manner

    return Manner(
        temperature=options.temperature, most_tokens=options.tokens, seed=options.seed
    )


def open_voice(found: Found, folder: Path, device: str, *, has_words: bool = True) -> Voice:
    """Load a model, and say so if that takes long.

    Raises:
        ConfigError: ``has_words`` is set and the model has no words.
    """
    with patience(f"loading {found.label} ({found.path})"):
        from roles.chat.voice import Voice

        voice = Voice(found, device)
    if has_words and voice.tokenizer is None:
        raise ConfigError(NO_WORDS.format(found.label, folder))
    return voice


def _sample(options: argparse.Namespace) -> int:
    folder = expanded(options.folder)
    found = find_models(folder, options.policy).newest
    voice = open_voice(found, folder, options.device)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    prompt, manner = voice.prompt([Turn("user", text)]), _manner(options)
    for number in range(options.count):
        pieces = voice.say(prompt, replace(manner, seed=options.seed + number))
        if options.json:
            answer = "".join(pieces)
            say(json.dumps({"model": found.label, "prompt": text, "answer": answer}))
            continue
        for piece in pieces:
            tell(piece, end="")
        say("")
    return 0


def _chat(options: argparse.Namespace) -> int:
    folder = expanded(options.folder)
    models = find_models(folder, options.policy)
    talk = _Talk(folder, models, options.device, _manner(options))
    is_person = sys.stdin.isatty()
    if is_person:
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` a history
        remark(
            f"this is {talk.voice.label}, {models.newest.path}; /help says what can be typed"
        )
        if not talk.voice.can_chat:
            remark("it has no chat template: it goes on writing what you begin")
    while True:
        try:
            text = input("> " if is_person else "").strip()
        except (EOFError, KeyboardInterrupt):
            if is_person:
                say("")
            return 0
        if text == "/exit":
            return 0
        if text.startswith("/"):
            talk.obey(text)
        elif text:
            talk.ask(text)


class _Talk:
    """One conversation with a model, or with the model that the run began with."""

    def __init__(self, folder: Path, models: Models, device: str, manner: Manner) -> None:
        self._folder, self._models, self._device = folder, models, device
        self._manner = manner
        self._voices: dict[Path, Voice] = {}
        self.voice = self._open(models.newest)
        self._turns: list[Turn] = []

    def _open(self, found: Found) -> Voice:
        if found.path not in self._voices:
            self._voices[found.path] = open_voice(found, self._folder, self._device)
        return self._voices[found.path]

    def obey(self, command: str) -> None:
        """Carry out a command line that begins with a slash."""
        if command == "/reset":
            self._turns.clear()
        elif command == "/before" and self._models.first is None:
            say(f"{self._folder} has no model from before the training")
        elif command in ("/before", "/after"):
            first, newest = self._models.first, self._models.newest
            self.voice = self._open(first if first and command == "/before" else newest)
            say(f"[{self.voice.label}]")
            if self._turns:
                asked = self._turns[-2]
                del self._turns[-2:]
                self.ask(asked.content)
        else:
            say(HELP)

    def ask(self, text: str) -> None:
        """Print the answer to ``text`` as it comes; Ctrl-C ends it."""
        said, turns = "", [*self._turns, Turn("user", text)]
        try:
            for piece in self.voice.say(self.voice.prompt(turns), self._manner):
                tell(piece, end="")
                said += piece
        except KeyboardInterrupt:
            tell(" [cut]", end="")
        except BadModel as error:
            complain(f"{error}; /reset forgets what was said before")
            return
        tell("")
        self._turns = [*turns, Turn("assistant", said)]
        self._manner = replace(self._manner, seed=self._manner.seed + 1)
