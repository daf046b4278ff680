"""Questions with answers from a file of this machine: JSON lines, pinned by the run.

Each line is ``{"question": "...", "answer": "..."}``. The run pins name, size and digest of the
file, the machine's owner says in which folder it lies (`roles.envs.data`). ``math`` judges by
math-verify, which knows that 1/2 is 0.5; ``math-exact`` compares text and needs no package. A
run names the one or the other: if it depended on what is installed, a validator and a trainer
would pay differently.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
from collections.abc import Callable
from random import Random
from typing import Any, Final

from p2p.errors import ConfigError
from p2p.wire import KI
from roles.envs.formulas import (
    MAX_LENGTH,
    may_compute,
    may_read,
    measure_parts,
    read_arithmetic,
)
from roles.envs.installed import require
from roles.envs.text import Message, TextTask, is_held_out

MAX_LINES: Final = 1024 * KI
"""Questions in a file. The largest collections in use have 900,000."""
MAX_LINE: Final = 64 * KI
"""Bytes of a line: 16,000 tokens, half of the longest completion that a machine allows unless
told otherwise."""
MAX_NAMED: Final = 5
"""Bad lines that an error names."""
EVALUATION_TASKS: Final = 256
"""Held-out questions of an evaluation, or all that there are. The standard error of a share of
256 is at most 0.031."""
EVALUATION_SEED: Final = "math 4242"
"""Of those questions: the same in every evaluation of a file."""
PACKAGES: Final = {
    "math-verify": "0.9.0",
    "latex2sympy2-extended": "1.11.0",
    "sympy": "1.14.0",
}
"""What decides whether two formulas are equal, by version: all nodes must have the same."""

_INSTRUCTION: Final = "\nPut the final answer in \\boxed{}."
_BOX: Final = re.compile(r"\\boxed\{")
_BOXED: Final = re.compile(r"\\boxed\{([^{}]*)\}")


class ExactEnvironment:
    """Right is what is written as the answer is, but for blanks."""

    name = "math-exact"

    def __init__(self, data: bytes = b"") -> None:
        """Raises `ConfigError` if ``data`` is no such file."""
        questions = _read(data)
        self._sides = {
            side: [one for one in questions if is_held_out(one[0]) == side]
            for side in (False, True)
        }
        if not all(self._sides.values()):
            raise ConfigError(
                f"the {len(questions)} questions of the environment {self.name!r} are all on"
                " one side: one in eight is held out by its hash, and each side needs at least"
                " one"
            )

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        """The question whose number follows from the seed."""
        side = self._sides[held_out]
        number = int.from_bytes(hashlib.sha256(seed).digest()[:8], "big")
        return _task(*side[number % len(side)])

    async def reward(self, task: TextTask, text: str, ended: bool) -> float:
        """1 if the model stopped by itself and its final answer is right."""
        return 1.0 if ended and self._is_right(task.answer, text) else 0.0

    def evaluation(self) -> list[TextTask]:
        """Held-out questions, drawn once for all."""
        held = self._sides[True]
        count = min(EVALUATION_TASKS, len(held))
        return [_task(*one) for one in Random(EVALUATION_SEED).sample(held, count)]

    def _is_right(self, answer: str, text: str) -> bool:
        return _final(text) == " ".join(answer.split())


class MathEnvironment(ExactEnvironment):
    """Right is what equals the answer, by math-verify."""

    name = "math"

    def __init__(self, data: bytes = b"") -> None:
        """Raises `ConfigError` without math-verify of the one version."""
        require(PACKAGES, extra="math", what=f"the environment {self.name!r}")
        super().__init__(data)
        math_verify = importlib.import_module("math_verify")
        # sympy imports it late, and it reads formulas of its own with what is replaced below.
        importlib.import_module("sympy.physics.units")
        # The two names by which a text, if of digits, comes to Python's `eval`.
        for name in ("math_verify.parser", "sympy.parsing.sympy_parser"):
            reader: Any = importlib.import_module(name)
            reader.parse_expr = read_arithmetic
        measure_parts(
            importlib.import_module("latex2sympy2_extended.latex2sympy2")._Latex2Sympy
        )
        # It warns at each start that a caller without its time limit needs one: there is one.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._parse: Callable[..., list[Any]] = math_verify.parse
        self._verify: Callable[..., bool] = math_verify.verify

    def _is_right(self, answer: str, text: str) -> bool:
        """What is written as the answer is, or equals it; by reading and computing only what
        costs little (`roles.envs.formulas`).

        Without the package's own time limit: it is an alarm signal, which the process needs for
        the limit on all of it (`roles.envs.ration`).
        """
        if super()._is_right(answer, text):
            return True
        right, said = self._read(answer), self._read(_last_formula(text))
        return bool(right and said and self._verify(right, said, timeout_seconds=None))

    def _read(self, text: str) -> list[Any]:
        """What math-verify makes of it; nothing if it may cost much."""
        if not may_read(text):
            return []
        found = self._parse(text, parsing_timeout=None)
        return found if all(map(may_compute, found)) else []


def _task(question: str, answer: str) -> TextTask:
    return TextTask((Message("user", question + _INSTRUCTION),), "", answer)


def _final(text: str) -> str:
    """What stands in the last box, or else the last line."""
    boxed = _BOXED.findall(text)
    lines = text.strip().splitlines()
    return " ".join((boxed or lines or [""])[-1].split())


def _last_formula(text: str) -> str:
    """What is judged: the boxes of the last line that has one, or the end of the text."""
    for line in reversed(text.splitlines()):
        boxes = _boxes(line)
        if boxes:
            return " and ".join(boxes)
    end = text.strip()
    return end if len(end) <= MAX_LENGTH else end[-MAX_LENGTH:].partition(" ")[2]


def _boxes(line: str) -> list[str]:
    r"""Each ``\boxed{...}`` with the brackets within it, as it stands there."""
    boxes = []
    for start in _BOX.finditer(line):
        depth = 0
        for place in range(start.end() - 1, len(line)):
            depth += (line[place] == "{") - (line[place] == "}")
            if not depth:
                boxes.append(line[start.start() : place + 1])
                break
    return boxes


def _read(data: bytes) -> list[tuple[str, str]]:
    """Questions and answers. Raises `ConfigError` with the numbers of the first bad lines."""
    lines = data.splitlines()
    if not lines:
        raise ConfigError(
            "the environments math and math-exact need a file of questions: the run pins one as"
            " `data`"
        )
    if len(lines) > MAX_LINES:
        raise ConfigError(
            f"a file of questions has at most {MAX_LINES:,} lines, not {len(lines):,}"
        )
    questions, bad = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            questions.append(_question(line))
        except ValueError as error:
            bad.append(f"line {number} {error}")
    if bad:
        more = f", and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        raise ConfigError(f"a file of questions is bad: {'; '.join(bad[:MAX_NAMED])}{more}")
    return questions


def _question(line: bytes) -> tuple[str, str]:
    """Raises ValueError with the end of a sentence that begins with the line."""
    if len(line) > MAX_LINE:
        raise ValueError(f"has {len(line):,} bytes, at most {MAX_LINE:,}")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("is no JSON object")
    texts = value.get("question"), value.get("answer")
    for key, text in zip(("question", "answer"), texts, strict=True):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"has no text under {key!r}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"has half a character under {key!r}") from None
    return texts  # type: ignore[return-value]
