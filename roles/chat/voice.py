"""A model that answers: opened from a folder, drawn from token by token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from p2p.errors import ConfigError, MissingDependency
from proofs.sampling import DrawRule
from roles.chat.find import Found
from roles.contract.core.shape import Dtype, ModelShape
from roles.engines.base import Answers, GroupTask, Sampling
from roles.engines.hardware import free_memory
from roles.models.bundle import CONFIG, check_weights, read_config
from roles.models.config import ModelConfig
from roles.models.ends import read_end_tokens
from roles.models.errors import BadModel

try:
    import torch

    from roles.engines.torch.device import find_device
    from roles.engines.torch.files import load_weights
    from roles.engines.torch.hosted import new_model
    from roles.engines.torch.sampler import Sampler, draw
except ImportError as error:
    raise MissingDependency(
        f"a model is computed by torch: pip install 'shoal[torch,hf]' ({error})"
    ) from error

if TYPE_CHECKING:
    from roles.models.tokenizer import ChatMessage, Tokenizer

_UNFINISHED: Final = "\ufffd"
"""Character that a decoder writes for the first bytes of another one."""
_SPARE: Final = 1 << 30
"""Bytes beside the weights: keys and values of one conversation, and the libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """The settings with which answers are drawn."""

    temperature: float = 0.7
    """0 takes the most probable token."""
    most_tokens: int = 512
    seed: int = 0


class Voice:
    """One model that is loaded in this process."""

    def __init__(self, found: Found, device: str = "auto") -> None:
        """Load the model.

        Raises:
            ConfigError: The device or the folder cannot be used.
            BadModel: The model cannot be used.
            MissingDependency: A package is missing.
        """
        self.label = found.label
        self.run = found.run
        self._device = find_device(device)
        self._rule = DrawRule.CDF if found.run is None else found.run.terms.model.draw
        self.tokenizer: Tokenizer | None = None
        if (found.path / CONFIG).is_file():
            config = read_config(found.path)
            check_weights(found.path, config)
            self.shape, self.context = config.shape, config.context
            self.tokenizer, self.ends = _open_tokenizer(found.path, config)
        elif found.run is not None:
            model = found.run.terms.model
            self.shape, self.context, self.ends = model.shape, model.context, model.end_tokens
        else:
            raise ConfigError(
                f"{found.path} are weights without a {CONFIG}, and no run file lies beside them"
            )
        self._check_memory(self.shape)
        self._model = new_model(self.shape, Dtype.FLOAT32, self._device, found.path)
        self._model.lay_for_reading()
        load_weights(self._model, found.path)

    def _check_memory(self, shape: ModelShape) -> None:
        needs = 4 * shape.parameters + _SPARE
        if self._device.type == "cpu" and (free := free_memory()) < needs:
            raise ConfigError(
                f"{self.label} needs {needs / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB"
                " are free here"
            )

    @property
    def can_chat(self) -> bool:
        """True if the model has a chat template."""
        return self.tokenizer is not None and self.tokenizer.has_template

    def prompt(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the tokens of a conversation. For a model without a chat template, return
        those of the last message, which it continues."""
        assert self.tokenizer is not None
        if self.tokenizer.has_template:
            return self.tokenizer.chat(messages)
        return self.tokenizer.encode(messages[-1].content)

    def say(self, prompt: Sequence[int], manner: Manner) -> Iterator[str]:
        """Yield the answer to ``prompt`` in pieces, as it is drawn.

        Raises:
            BadModel: The prompt leaves no room in the model's context.
        """
        assert self.tokenizer is not None
        said = ""
        for tokens in self.tokens(prompt, manner):
            shown = [token for token in tokens if token not in self.ends]
            text = self.tokenizer.decode(shown)
            if len(text) > len(said) and not text.endswith(_UNFINISHED):
                yield text[len(said) :]
                said = text

    def tokens(self, prompt: Sequence[int], manner: Manner) -> Iterator[tuple[int, ...]]:
        """Yield all tokens that were drawn by now, after each."""
        room = self.context - len(prompt)
        if room < 1 or not prompt:
            raise BadModel(
                f"a prompt of {len(prompt):,} tokens leaves no room for an answer in the"
                f" model's context of {self.context:,}"
            )
        sampling = Sampling(manner.temperature, min(room, manner.most_tokens), 1)
        sampler = Sampler(self._model, frozenset(self.ends), self._rule)
        seed = hashlib.sha256(f"chat {manner.seed}".encode()).digest()
        sampler.add([GroupTask(0, tuple(prompt), (seed,))], sampling)
        while sampler.has_work:
            sampler.step()
            yield from sampler.under_way().values()
        for _, group in sampler.take_ended():
            yield group.completions[0].tokens

    def likelihood(self, prompt: Sequence[int], rest: Sequence[int]) -> tuple[float, bool]:
        """Return the log-probability of ``rest`` behind ``prompt``, and whether each of its
        tokens is the most probable one. The front of a prompt that is too long is left out."""
        tokens = torch.tensor([[*prompt, *rest]], device=self._device)[:, -self.context - 1 :]
        with torch.inference_mode():
            hidden = self._model(tokens[:, :-1])[0, -len(rest) :]
            found = self._model.logits(hidden).double().log_softmax(-1)
        wanted = tokens[0, -len(rest) :]
        is_greedy = bool((found.argmax(-1) == wanted).all())
        return float(found.gather(1, wanted[:, None]).sum()), is_greedy

    def answers(
        self, tasks: Sequence[GroupTask], sampling: Sampling, ends: Sequence[int]
    ) -> list[Answers]:
        """Return the completions of each task, each cut at an end token."""
        groups = draw(self._model, tasks, sampling, frozenset(ends), self._rule)
        return [tuple(one.tokens for one in group.completions) for group in groups]


def _open_tokenizer(
    folder: Path, config: ModelConfig
) -> tuple[Tokenizer | None, tuple[int, ...]]:
    """Return the folder's tokenizer, tried before it is opened, and all end tokens; None for a
    model without one."""
    if not (folder / "tokenizer.json").exists():
        return None, config.end_tokens
    ends = read_end_tokens(folder, config).tokens
    from roles.models.tokenizer import Tokenizer

    return Tokenizer.open(folder), ends
