"""`python -m tests.transcripts`: which transcripts come out differently; `--write` renews
them.
"""

from __future__ import annotations

import argparse
import sys

from tests.transcripts import HERE, play_file, transcripts


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.transcripts", description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew the output of every step")
    arguments = parser.parse_args()
    changed = 0
    for path in transcripts():
        now = play_file(path)
        if now == path.read_text(encoding="utf-8"):
            continue
        changed += 1
        word = "renewed" if arguments.write else "differs"
        sys.stdout.write(f"{word} {path.relative_to(HERE).as_posix()}\n")
        if arguments.write:
            path.write_text(now, encoding="utf-8")
    return int(bool(changed) and not arguments.write)


if __name__ == "__main__":
    sys.exit(main())
