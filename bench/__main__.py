"""``python -m bench NAME [...]`` runs ``bench/NAME.py`` (dashes become underscores):
``run(args) -> int``.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Sequence

import bench

NOT_BENCHES = (
    "__main__",
    "allreduce_member",
    "engine_work",
    "falsified",
    "foreign_generate",
    "prime",
    "report",
    "rl_like",
)


def names() -> list[str]:
    """Return the names of all benches, as they are typed."""
    found = (module.name for module in pkgutil.iter_modules(bench.__path__))
    return sorted(name.replace("_", "-") for name in found if name not in NOT_BENCHES)


def main(argv: Sequence[str]) -> int:
    """Run the bench that ``argv`` names and return its exit status. Print the usage if there is
    no such bench (status 2) or ``--help`` is given (status 0)."""
    if not argv or argv[0] in {"-h", "--help"} or argv[0] not in names():
        print(
            f"usage: python -m bench NAME [--json FILE] [...]\n\nbenches: {', '.join(names())}"
        )
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    # ``--json -``: standard output is for the JSON
    people = sys.stderr if "-" in argv[1:] else sys.stdout
    try:
        module = importlib.import_module(f"bench.{argv[0].replace('-', '_')}")
        with contextlib.redirect_stdout(people):
            code: int = module.run(list(argv[1:]))
    except KeyboardInterrupt:
        print(f"bench {argv[0]}: interrupted", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
