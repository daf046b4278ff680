"""``python -m tests.transcripts [--write]``: play all transcripts, or renew them."""

from __future__ import annotations

import sys

from tests.transcripts.engine import HERE, play, player_of, transcripts
from tests.transcripts.players import PLAYERS


def main() -> int:
    """Play; with ``--write`` renew the files, else name those that differ."""
    different = 0
    for path in transcripts():
        text = path.read_text(encoding="utf-8")
        played = play(text, player_of(path, PLAYERS))
        if played != text:
            different += 1
            if "--write" in sys.argv:
                path.write_text(played, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(HERE)}\n")
    return 0 if "--write" in sys.argv else min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
