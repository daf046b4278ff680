"""No package gains code lines without a commit that says why.

A code line is a line of Python that is neither blank, nor comment, nor docstring. To see which
rows can be lowered: `python -m tests.test_size`.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Code lines of each package with everything below it. `p2p` and `sim` are the modules that lie
# directly in them; `tests` is all tests, in code lines too. The first numbers were those of
# commit eb244e04 (tests: 57007).
LIMITS = {
    "p2p": 2274,
    "p2p/cast": 1898,
    "p2p/circuit": 798,
    "p2p/dht": 1988,
    "p2p/gossip": 973,
    "p2p/ledger": 1093,
    "p2p/membership": 2237,
    "p2p/node": 4048,
    "p2p/reach": 1144,
    "p2p/sandbox": 700,
    "p2p/shardcast": 6434,
    "p2p/swarm": 1988,
    "p2p/transport": 2499,
    "proofs": 1010,
    "roles": 6,
    "roles/calibrate": 683,
    "roles/chat": 707,
    "roles/contract": 974,
    "roles/demo": 650,
    "roles/diloco": 3919,
    "roles/doctor": 707,
    "roles/engines": 5361,
    "roles/envs": 3738,
    "roles/inference": 1336,
    "roles/ledger": 790,
    "roles/models": 1876,
    "roles/own": 3763,
    "roles/protocol": 2508,
    "roles/rl": 665,
    "roles/shared": 168,
    "roles/trainer": 3513,
    "roles/trl": 360,
    "roles/validator": 426,
    "roles/workers": 416,
    "sim": 606,
    "sim/faults": 668,
    "sim/kernel": 639,
    "sim/net": 621,
    "sim/node": 1413,
    "sim/run": 1170,
    "sim/studies": 3440,
    "sim/workloads": 2650,
    "tests": 49308,
}

NO_CODE = {
    tokenize.COMMENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.INDENT, tokenize.NEWLINE,
    tokenize.NL,
}  # fmt: skip


def code_lines(source: str) -> int:
    """Return the number of lines that are neither blank, nor comment, nor docstring."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):  # also behind a constant or a field
                lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def measure() -> dict[str, int]:
    """Return the code lines of each row."""
    sizes: dict[str, int] = {}
    for top in ("p2p", "proofs", "roles", "sim", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            package = path.relative_to(ROOT).parts[1:-1]
            row = f"{top}/{package[0]}" if package and top != "tests" else top
            sizes[row] = sizes.get(row, 0) + code_lines(path.read_text(encoding="utf-8"))
    return {row: size for row, size in sizes.items() if size}


def table(sizes: dict[str, int]) -> str:
    """Return the rows as `LIMITS` would hold them, with a note behind each that differs."""
    lines = []
    for row in sorted({*sizes, *LIMITS}):
        size, limit = sizes.get(row, 0), LIMITS.get(row, 0)
        note = f"  # above its limit, {limit}" if size > limit else ""
        if size < 0.98 * limit:
            note = f"  # lower the row: {limit - size} below" if size else "  # delete the row"
        lines.append(f'    "{row}": {size},{note}\n')
    return "".join(lines)


def test_no_package_gains_code_without_a_word() -> None:
    sizes = measure()
    sys.stdout.write(table(sizes))  # pytest shows it when the test fails, or with -s
    grown = [row for row, size in sizes.items() if size > LIMITS.get(row, 0)]
    assert grown == [], "delete some code, or raise the row and say why in the commit"


def test_only_code_counts() -> None:
    source = (
        '"""Doc.\n\nMore.\n"""\n\n# why\nX = 1\n"""Field."""\n\n\n'
        'def f() -> str:\n    """Doc."""\n    return """a\n\nb"""  # three lines\n'
    )
    assert code_lines(source) == 5


if __name__ == "__main__":
    sys.stdout.write(table(measure()))
