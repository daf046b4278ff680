"""The process in which a member computes: ``python -m roles.diloco.worker``.

Here are the model, its optimiser, and whatever else is as large as the model. States, updates
and means are files of pieces that lie end to end, which the node serves to others and fetches
from them; a state is raw float32, weights and then moments, and is mapped where it lies. Few
pieces at a time cross the pipe, to be summed. So the node holds digests and no vector.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from p2p.errors import ConfigError, MissingDependency
from p2p.node.tables import read_table
from roles.contract.core.diloco import DilocoTerms
from roles.contract.core.pin import OPTIONAL, REQUIRED
from roles.diloco.core.outer import Arithmetic, BadPiece, digests_of
from roles.diloco.corpus import TextCodec, open_corpora
from roles.diloco.material import Rewards, Texts
from roles.engines.base import EngineError
from roles.engines.config import EngineConfig
from roles.engines.hardware import threads_of
from roles.envs.base import open_teaching
from roles.envs.mix import EnvironmentSetup, open_mix
from roles.models.bundle import CONFIG, INDEX
from roles.models.byte_level import byte_files
from roles.workers.server import serve

PROMPT: Final = 40
"""Tokens of a text that the model is given to go on with."""


class InnerServer:
    """The methods that a node may call. Paths are the operating system's."""

    def configure(
        self, config: Any, terms: Any, places: Any, base: str, environments: Any
    ) -> int:
        """Prepare this process and return the size of the model. ``environments`` are those of
        a run that learns from rewards, else None."""
        engine = read_table(EngineConfig, config, "the engine")
        os.nice(engine.nice)
        os.environ["OMP_NUM_THREADS"] = str(threads_of(engine))
        try:
            from roles.diloco.pretrain import Pretrainer
            from roles.engines.torch.device import find_device
            from roles.engines.torch.ranks import Ranks
        except ImportError as error:
            raise MissingDependency(
                f"the torch engine needs torch: pip install 'shoal[torch]' ({error})"
            ) from error
        run = read_table(DilocoTerms, terms, "the run file")
        device = find_device(engine.device)
        self._engine, self._folder = engine, Path(base) if base else None
        folder = self._folder
        is_shared = engine.gpus.ranks > 1 or engine.gpus.offload
        self._text = TextCodec(self._folder)
        self._material: Texts | Rewards
        rewards: Rewards | None = None
        if environments is None:
            corpus = open_corpora(
                run.corpora, places, self._text.encode, end=engine.end_tokens[0],
                vocabulary=engine.shape.vocabulary, window=run.window, held_out=run.held_out,
                anneal=run.anneal,
            )  # fmt: skip
            self._material = Texts(corpus, engine, run)
        elif is_shared:
            raise ConfigError(
                'goal = "reward" learns in one process: take ranks and offload out of'
                " [role.trainer.gpus]"
            )
        else:
            setup = read_table(EnvironmentSetup, environments, "the environments")
            teacher = None if base else open_teaching(engine.environment)
            rewards = Rewards(open_mix(setup), teacher, engine, run)
            self._material = rewards
        make = partial(Pretrainer, run, folder, rewards)
        self._call: Callable[..., Any]
        """Calls a method of the `Pretrainer`, in all its processes."""
        self.close: Callable[[], None] = lambda: None
        """Ends what other processes there are; the end of this one does it as well."""
        if is_shared:
            ranks = Ranks(engine, make)
            self._call, self.close = ranks.all, ranks.close
        else:
            trainer = make(engine, device)
            self._call = lambda method, *arguments: getattr(trainer, method)(*arguments)
        size = engine.shape.parameters
        self._arithmetic = Arithmetic(run, size)
        return size

    # What all members compute alike.

    def begin(self, path: str) -> list[bytes]:
        """Write the state of step 0; the digests of its pieces."""
        state = self._arithmetic.begun(self._call("vector"))
        _write(path, [state.data.cast("B")])
        return digests_of(self._arithmetic.state_grid, state.data.cast("B"))

    def digests(self, path: str, is_state: bool) -> list[bytes]:
        """Return the digests of the pieces in a file; none if the file has the wrong length."""
        arithmetic = self._arithmetic
        grid = arithmetic.state_grid if is_state else arithmetic.grid
        return digests_of(grid, _mapped(path))

    def sum(
        self,
        first: int,
        parts: Sequence[Sequence[bytes]],
        norms: Sequence[Sequence[float]],
        by: Sequence[float],
    ) -> object:
        """Return ``[True, pieces]`` as `Arithmetic.summed` gives them, or ``[False, [rank,
        index]]`` for a bad piece.
        """
        try:
            return [True, self._arithmetic.summed(first, parts, norms, by)]
        except BadPiece as bad:
            return [False, [bad.rank, bad.index]]

    def advance(self, before: str, mean: str, after: str, step: int) -> object:
        """Take an outer step from the state ``before`` to a file ``after``. Return the digests
        of its pieces, or the number of a piece of the mean that cannot be read."""
        arithmetic = self._arithmetic
        shutil.copyfile(before, f"{after}.partial")
        values = np.memmap(f"{after}.partial", "<f4", "r+")
        try:
            arithmetic.advance(arithmetic.rows(values), _mapped(mean), step)
        except BadPiece as bad:
            return bad.index
        values.flush()
        _finish(after)
        return self.digests(after, True)

    # Inner steps.

    def load(self, path: str, start: int, stop: int, is_ahead: bool) -> None:
        """Begin a round from the weights of the state at ``path``: see `Pretrainer.load`."""
        self._call("load_from", path, start, stop, is_ahead)

    def train(self, first: int, steps: int, window: int) -> list[Any]:
        found: tuple[Any, ...] = self._call(
            "train", self._material.batches(window, first, steps), first
        )
        return list(found)

    def encode(self, path: str, step: int) -> list[Any]:
        """Write the encoded update of a step, and the optimiser's state beside it. Return the
        digests and norms of the update's pieces."""
        update = self._call("update")
        try:
            pieces, norms = self._arithmetic.encoded(update, step)
        except ValueError as error:
            raise EngineError(f"this member's update cannot be sent: {error}") from error
        _write(path, pieces)
        self._call("save", Path(path).parent, step)
        data = b"".join(pieces)
        return [digests_of(self._arithmetic.grid, data), norms]

    def restore(self, folder: str, step: int) -> list[str]:
        damage: list[str] = self._call("restore", Path(folder), step)
        return damage

    def loss(self) -> float:
        return float(self._call("loss", self._material.held_out()))

    def write(self, count: int) -> list[str]:
        """Return the beginning of a held-out text, and the model's continuation. A model of
        questions writes nothing: its reward says how well it answers."""
        if isinstance(self._material, Rewards):
            return ["", ""]
        begun = self._material.held_out()[0][0][:PROMPT]
        said = self._call("continue_text", begun.tolist(), count, 0)
        return [self._text.decode(begun.tolist()), self._text.decode(said)]

    def export(self, folder: str) -> None:
        """Export the model with its tokenizer files (see `Pretrainer.export`)."""
        from roles.engines.torch.files import write_atomically

        place = Path(folder)
        self._call("export", place)
        if self._folder is not None:
            for name in {*REQUIRED, *OPTIONAL} - {CONFIG, INDEX}:
                if (self._folder / name).is_file():
                    write_atomically(place / name, (self._folder / name).read_bytes())
        elif not isinstance(self._material, Rewards):
            for name, text in byte_files(self._engine.context, self._engine.end_tokens).items():
                write_atomically(place / name, text.encode())


def _mapped(path: str) -> memoryview:
    """Return the bytes of a file, mapped into memory."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _write(path: str, parts: Sequence[bytes | memoryview]) -> None:
    """Write a file whole or not at all, and durably."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.partial", "wb") as file:
        file.writelines(parts)
    _finish(path)


def _finish(path: str) -> None:
    """Rename ``path.partial`` to its final name, durably."""
    _sync(f"{path}.partial")
    os.replace(f"{path}.partial", path)
    _sync(os.path.dirname(path))


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def main() -> None:
    """Serve one member on the standard streams."""
    serve(InnerServer())


if __name__ == "__main__":
    main()
