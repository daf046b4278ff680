"""The process in which a member's inner steps are computed: ``python -m roles.diloco.worker``.

Frames on the standard streams, as with `roles.engines.worker`; vectors are in files of raw
float32, of which the frames say where they are. What a caller or its machine can cause comes
back as a `Failure`; anything else ends the process with a traceback.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2p.errors import MissingDependency
from p2p.naming import derived
from p2p.node.tables import read_table
from roles.contract.core.diloco import DilocoTerms
from roles.diloco.corpus import open_corpora
from roles.diloco.material import Rewards, Texts
from roles.engines.config import EngineConfig
from roles.engines.hardware import threads_of
from roles.envs.base import open_teaching
from roles.envs.mix import EnvironmentSetup, open_mix
from roles.workers.server import serve


class InnerServer:
    """One model, and what it learns from."""

    def __init__(
        self,
        config: EngineConfig,
        terms: DilocoTerms,
        places: Mapping[str, str],
        base: str,
        environments: EnvironmentSetup | None = None,
    ) -> None:
        """``environments`` are those of a run that learns from rewards."""
        try:
            from roles.engines.torch.objectives import Objective, RewardLoss
            from roles.engines.torch.pretrain import Pretrainer
        except ImportError as error:
            raise MissingDependency(
                f"the torch engine needs torch: pip install 'shoal[torch]' ({error})"
            ) from error
        self._text = _TextCodec(base)
        self._material: Texts | Rewards
        objective: Objective | None = None
        if environments is None:
            corpus = open_corpora(
                terms.corpora, places, self._text.encode, end=config.end_tokens[0],
                vocabulary=config.shape.vocabulary, window=terms.window,
                held_out=terms.held_out, anneal=terms.anneal,
            )  # fmt: skip
            self._material = Texts(corpus, config, terms)
        else:
            teacher = None if base else open_teaching(config.environment)
            rewards = Rewards(open_mix(environments), teacher, config, terms)
            self._material, objective = rewards, RewardLoss(config, terms, rewards)
        self._trainer = Pretrainer(config, terms, Path(base) if base else None, objective)

    def call(self, method: str, arguments: Sequence[Any]) -> object:
        """The result is fit for the pipe."""
        trainer = self._trainer
        match method, arguments:
            case "begin", [path]:
                _write(path, trainer.vector())
                return None
            case "load", [path, start, stop]:
                trainer.load(np.fromfile(path, "<f4", trainer.size), slice(start, stop))
                return None
            case "shift", [path, start, stop]:
                trainer.shift(np.fromfile(path, "<f4", trainer.size), slice(start, stop))
                return None
            case "train", [first, steps, window]:
                return astuple(
                    trainer.train(self._material.batches(window, first, steps), first)
                )
            case "update", [path]:
                _write(path, trainer.update())
                return None
            case "loss", []:
                return trainer.loss(self._material.held_out())
            case "write", [text, count]:
                return self._written(text, count)
            case "save", [path, previous, step]:
                trainer.save(Path(path), Path(previous), step)
                return None
            case "restore", [path]:
                return trainer.restore(Path(path))
            case "export", [folder]:
                trainer.export(Path(folder))
                return None
        raise TypeError(f"an inner engine has no method {method}({len(arguments)} arguments)")

    def _written(self, text: str, count: int) -> str:
        """Nothing from a model of questions: its reward says how well it answers."""
        if isinstance(self._material, Rewards):
            return ""
        start = self._text.encode(text)
        return self._text.decode(self._trainer.continue_text(start, count, seed=0))

    @property
    def size(self) -> int:
        """Weights of the model."""
        return self._trainer.size


class _TextCodec:
    """The tokenizer of the base, or bytes where there is no base."""

    def __init__(self, base: str) -> None:
        self._tokenizer: Any = None
        if base:
            from roles.models.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.open(Path(base))

    def encode(self, text: str) -> Sequence[int]:
        """A document as tokens."""
        if self._tokenizer is None:
            return text.encode()
        found: Sequence[int] = self._tokenizer.encode(text)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """For people."""
        if self._tokenizer is None:
            return bytes(one for one in tokens if one < 256).decode(errors="replace")
        return str(self._tokenizer.decode(tokens))


def _write(path: str, vector: NDArray[np.float32]) -> None:
    """Whole or not at all; it need not outlive a crash of the machine."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(derived(target.name, after=".partial"))
    vector.astype("<f4").tofile(unfinished)
    unfinished.replace(target)


class Server:
    """What a node may call."""

    def configure(
        self, config: Any, terms: Any, places: Any, base: str, environments: Any
    ) -> int:
        """Prepare this process; the size of the model."""
        found = read_table(EngineConfig, config, "the engine")
        os.nice(found.nice)
        os.environ["OMP_NUM_THREADS"] = str(threads_of(found))
        setup = (
            None
            if environments is None
            else read_table(EnvironmentSetup, environments, "the environments")
        )
        read = read_table(DilocoTerms, terms, "the run file")
        self._inner = InnerServer(found, read, places, base, setup)
        return self._inner.size

    def call(self, method: str, *arguments: Any) -> object:
        """Call a method of the model."""
        return self._inner.call(method, arguments)


def main() -> None:
    """Serve one member's inner steps on the standard streams."""
    serve(Server())


if __name__ == "__main__":
    main()
