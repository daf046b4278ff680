"""Every transcript says what its core does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transcripts.engine import HERE, Step, parse, play, player_of, transcripts
from tests.transcripts.players import PLAYERS


@pytest.mark.parametrize("path", transcripts(), ids=lambda path: path.relative_to(HERE).as_posix())
def test_a_transcript_is_what_the_core_does(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert play(text, player_of(path, PLAYERS)) == text


class Echo:
    def do(self, line: str) -> list[str]:
        return [] if line == "quiet" else [line.upper()]


def test_a_transcript_is_parsed_and_played() -> None:
    text = "# why\n\none\ntwo\n----\nold\n\nquiet\n----\n\n# end\n"
    assert list(parse(text)) == [
        Step(["# why", ""], ["one", "two"], ["old"]),
        Step([], ["quiet"], []),
        Step(["# end"]),
    ]
    played = "# why\n\none\ntwo\n----\nONE\nTWO\n\nquiet\n----\n(nothing)\n\n# end\n"
    assert play(text, Echo()) == played
    assert play(played, Echo()) == played


def test_a_command_without_dashes_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no ----"):
        list(parse("one\n"))
