"""The worker process of a member: what it is asked over the pipe, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2p.errors import ConfigError
from p2p.node.tables import write_table
from roles.contract.core.diloco import DilocoTerms
from roles.diloco import worker
from roles.engines.config import EngineConfig
from tests.model_folders import END, LLAMA, make_folder

pytest.importorskip("torch")

TEXT = "hello world, hello shoal. " * 400
TERMS = DilocoTerms(
    corpora={"words": 1.0}, window=8, sequences=4, inner_steps=20, outer_steps=5, warmup=1,
    held_out=16,
)  # fmt: skip
CONFIG = EngineConfig(shape=LLAMA, environment=None, end_tokens=(END,), threads=0)
"""As a node has it by default: as many threads as cores allow."""
SIZE = LLAMA.parameters


def opened(
    tmp_path: Path, config: EngineConfig = CONFIG, text: str = TEXT
) -> tuple[Callable[..., list[Any]], object]:
    """What calls a worker that serves within this process, and what `configure` gave."""
    (tmp_path / "words.txt").write_text(text)
    base = make_folder(tmp_path / "model")
    places = {"words": str(tmp_path / "words.txt")}
    server = worker.Server()
    configure = (write_table(config), write_table(TERMS), places, str(base), None)

    def calls(*messages: tuple[object, ...]) -> list[Any]:
        server.configure(*configure)
        return [server.call(*message) for message in messages]  # type: ignore[arg-type]

    return calls, server.configure(*configure)


def test_a_round_from_a_base_with_its_own_tokenizer(tmp_path: Path) -> None:
    calls, size = opened(tmp_path)
    start, update, folder = (str(tmp_path / name) for name in ("start", "update", "export"))
    before, trained, _, _, _, after, *rest = calls(
        ("loss",),
        ("train", 1, 20, 0),
        ("update", update),
        ("begin", start),
        ("load", start, 0, SIZE),
        ("loss",),
        ("write", "hello", 4),
        ("save", str(tmp_path / "moments"), str(tmp_path / "older"), 1),
        ("restore", str(tmp_path / "moments")),
        ("export", folder),
    )
    assert isinstance(size, int)
    assert trained[:2] == (20, 20 * 4 * 8)
    assert after < before - 0.1
    assert np.fromfile(start, "<f4").size == np.fromfile(update, "<f4").size == size
    assert isinstance(rest[0], str)
    assert rest[2] == 1
    assert (tmp_path / "export" / "config.json").exists()


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer is another model's"):
        opened(tmp_path, replace(CONFIG, shape=replace(LLAMA, vocabulary=100)))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        opened(tmp_path, text="")


def test_a_round_begun_again_after_any_of_its_steps_gives_the_same_bits(tmp_path: Path) -> None:
    """Killed with -9 at twenty points: windows, moments and schedule are where they were."""
    calls, size = opened(tmp_path)
    names = ("start", "moments", "older", "killed", "whole")
    start, moments, older, killed, whole = (str(tmp_path / name) for name in names)
    second = ("train", 20, 20, 80)  # of the round after, on the windows behind
    load = ("load", start, 0, SIZE)
    calls(
        ("begin", start), load, ("train", 0, 20, 0),
        ("save", moments, older, 1), load, second, ("update", whole),
    )  # fmt: skip
    expected = np.fromfile(whole, "<f4")
    assert np.count_nonzero(expected) > size // 2
    for done in range(20):
        calls(("restore", moments), load, ("train", 20, done, 80))  # and it dies
        found = calls(("restore", moments), load, second, ("update", killed))
        assert found[0] == 1
        assert np.array_equal(np.fromfile(killed, "<f4"), expected), done
