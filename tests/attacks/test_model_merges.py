"""``shoal models merge`` beside folders that are somebody's, and with parts that are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2p.node.usage import FAILED, WRONG_USAGE
from roles.models.__main__ import main
from tests.model_folders import make_folder


def merge(into: Path, *more: object) -> int:
    return main(["merge", str(into), *map(str, more)])


def test_no_folder_is_removed_that_the_merge_has_not_made(tmp_path: Path) -> None:
    """A model in ``INTO.partial``, an input even, was removed without a word."""
    one, two = make_folder(tmp_path / "one"), make_folder(tmp_path / "m.partial", seed=1)
    before = sorted(two.iterdir())
    assert merge(tmp_path / "m", one, two) == FAILED
    assert sorted(two.iterdir()) == before
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("is_pipe", [False, True])
def test_a_model_without_a_tokenizer_is_a_sentence(tmp_path: Path, is_pipe: bool) -> None:
    """Without one there was a traceback; a pipe was read for ever."""
    one, two = make_folder(tmp_path / "one"), make_folder(tmp_path / "two")
    (two / "tokenizer.json").unlink()
    if is_pipe:
        os.mkfifo(two / "tokenizer.json")
    assert merge(tmp_path / "m", one, two) == FAILED


def test_weights_beyond_all_sums_are_a_sentence(tmp_path: Path) -> None:
    assert merge(tmp_path / "m", "one", "two", "--weights", "1e308,1e308") == WRONG_USAGE
