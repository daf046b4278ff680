"""Tasks of lm-eval, EleutherAI's harness (PyPI lm-eval), answered by our own decoder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from p2p.errors import ConfigError, MissingDependency
from roles.chat.command import Turn
from roles.chat.voice import Manner, Voice
from roles.models.tokenizer import Tokenizer

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise MissingDependency(
        f"tasks of lm-eval need it: pip install lm-eval datasets ({error})"
    ) from error

MOST_TOKENS = 256  # of an answer, where a task names no number: lm-eval's own


class Decoder(LM):
    """A model of ours behind the interface that lm-eval uses."""

    def __init__(self, voice: Voice, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._voice = voice
        self._tokenizer = tokenizer

    @property
    def tokenizer_name(self) -> str:
        return self._voice.label

    def apply_chat_template(
        self, chat_history: Sequence[Any], add_generation_prompt: bool = True
    ) -> str:
        turns = [Turn(**message) for message in chat_history]
        if add_generation_prompt:
            return self._tokenizer.render(turns)
        return self._tokenizer.render(turns[:-1], prefill=turns[-1].content)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        return [self._answer(*request.args) for request in requests]

    def _answer(self, prompt: str, wants: dict[str, Any]) -> str:
        until = wants.get("until") or []
        stops = [until] if isinstance(until, str) else until
        most = min(int(wants.get("max_gen_toks") or MOST_TOKENS), self._voice.context // 2)
        heat = float(wants.get("temperature") or 0.0) if wants.get("do_sample") else 0.0
        tokens = self._tokenizer.encode(prompt)[most - self._voice.context :]
        text = ""
        for piece in self._voice.say(tokens, Manner(temperature=heat, most_tokens=most)):
            text += piece
            if ends := [at for stop in stops if (at := text.find(stop)) >= 0]:
                return text[: min(ends)]
        return text

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        found = []
        for before, text in (request.args for request in requests):
            # As lm-eval does: spaces at the end of the question are the answer's.
            bare = before.rstrip()
            prompt, whole = map(self._tokenizer.encode, (bare, before + text))
            rest = whole[len(prompt) :]
            found.append(self._voice.likelihood(prompt or self._voice.ends[:1], rest))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        return [sum(self._parts(*request.args)) for request in requests]

    def _parts(self, text: str) -> Iterator[float]:
        """Yield the log-probabilities of parts of a text, each as long as the context."""
        tokens = [self._voice.ends[0], *self._tokenizer.encode(text)]
        size = self._voice.context
        for at in range(1, len(tokens), size):
            yield self._voice.likelihood(tokens[at - 1 : at], tokens[at : at + size])[0]


def measure(
    voice: Voice, tasks: Sequence[str], limit: int | None, *, is_chat: bool
) -> dict[str, dict[str, float]]:
    """Return lm-eval's figures of a model, by task and metric; ``NAME_stderr`` is an error.

    Args:
        voice: The model.
        tasks: Names, or YAML files of one task each.
        limit: The first so many documents of each; None: all.
        is_chat: True if prompts go through the model's chat template.

    Raises:
        ConfigError: There is no such task, or lm-eval cannot play it.
    """
    if voice.tokenizer is None or (is_chat and not voice.can_chat):
        lacks = "chat template" if voice.tokenizer else "tokenizer"
        raise ConfigError(f"{voice.label} has no {lacks}, which lm-eval's tasks need")
    folders = sorted({str(Path(one).absolute().parent) for one in tasks if Path(one).is_file()})
    names = [Path(one).stem if Path(one).is_file() else one for one in tasks]
    manager = TaskManager(include_path=folders or None)
    if missing := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError(
            f"lm-eval has no task {missing[0]!r}: name one of its own, or a YAML file of one"
        )
    found = simple_evaluate(
        model=Decoder(voice, voice.tokenizer), tasks=names, task_manager=manager, limit=limit,
        apply_chat_template=is_chat, log_samples=False,
    )  # fmt: skip
    assert found is not None, "it is None in other ranks only"
    return {
        name: {
            key.partition(",")[0] if key.endswith(",none") else key: float(value)
            for key, value in row.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for name, row in found["results"].items()
    }
