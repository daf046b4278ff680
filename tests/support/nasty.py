"""Programs that try to differ between two machines, to hang one, or to break out.

``nasty.txt`` has one behind the other, with lines of ``%%`` between them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from roles.envs.wasm import Interpreter

PROGRAMS = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")[:-1].split("\n%%\n")
COMPACT = PROGRAMS[0:4] + PROGRAMS[8:10] + PROGRAMS[54:62:2] + PROGRAMS[111:118:3]
FUEL = {"compact": 600_000_000, "all": 3_000_000_000}


def main() -> None:
    """Print outcome, fuel and output of the programs, for another process to compare."""
    which, target = sys.argv[1], sys.argv[2]
    python = Interpreter("cpython", target=target)
    outcomes = [
        python.run(program, b"some\ninput\n", fuel=FUEL[which])
        for program in (COMPACT if which == "compact" else PROGRAMS)
    ]
    found = [[one.text, one.code, one.is_void, one.fuel] for one in outcomes]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
