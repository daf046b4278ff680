"""Every transcript comes out as it is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transcripts import HERE, PLAYERS, parse, play, play_file, transcripts


@pytest.mark.parametrize(
    "path", transcripts(), ids=lambda path: path.relative_to(HERE).as_posix()
)
def test_it_comes_out_as_it_is_written(path: Path) -> None:
    """`python -m tests.transcripts --write` renews it, for a person to read the difference."""
    assert play_file(path).splitlines() == path.read_text(encoding="utf-8").splitlines()


def test_every_player_has_texts() -> None:
    assert {path.parent.name for path in transcripts()} == set(PLAYERS)


class Echo:
    def play(self, command: str, args: list[str]) -> Iterator[str]:
        yield from [command, *args]


def test_comments_and_steps_stay_and_output_is_renewed() -> None:
    text = "# why\n\n> say a b\nold\n> say c\n"
    assert play(text, Echo()) == "# why\n\n> say a b\nsay\na\nb\n> say c\nsay\nc\n"
    with pytest.raises(ValueError, match="below no step"):
        parse("# why\nnot a step\n")
    with pytest.raises(ValueError, match="not a line of output"):
        play("> say #\n", Echo())
