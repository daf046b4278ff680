"""Questions with answers from a file of this machine, pinned by the run.

The file is JSON lines: ``{"question": "...", "answer": "..."}``. The run pins name,
size and digest of the file, the machine's owner says in which folder it lies
(`roles.envs.data`). ``math`` judges by math-verify, which knows that 1/2 is 0.5; ``math-exact``
compares text and needs no package. A run names the one or the other: if it depended on what is
installed, a validator and a trainer would pay differently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from random import Random
from typing import Final

from p2p.errors import ConfigError
from p2p.wire import KI
from roles.envs.answers import (
    are_alike,
    final_answer,
    final_answers,
    is_fragment,
    reads_back,
    unboxed,
    value_of,
)
from roles.envs.formulas import Formulas
from roles.envs.installed import require
from roles.envs.text import Message, TextTask, is_held_out

MAX_LINES: Final = 1024 * KI
"""Questions in a file. The largest collections in use have 900,000."""
MAX_LINE: Final = 64 * KI
"""Bytes of a line: 16,000 tokens, half of the longest completion that a machine allows unless
told otherwise."""
PARQUET: Final = b"PAR1"
"""How a Parquet file begins."""
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

QUESTIONS: Final = ("math", "math-exact")
"""Environments that read such a file."""
_INSTRUCTION: Final = "\nPut the final answer in \\boxed{}."


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
        return self.task_of(*side[number % len(side)])

    def task_of(self, question: str, answer: str) -> TextTask:
        """Return the task of a line of the file."""
        return TextTask((Message("user", question + _INSTRUCTION),), "", self._asked(answer))

    async def reward(self, task: TextTask, text: str, ended: bool) -> float:
        """1 if the model stopped by itself and its final answer is right."""
        return 1.0 if ended and self._is_right(unboxed(task.answer), text) else 0.0

    def evaluation(self) -> list[TextTask]:
        """Held-out questions, drawn once for all."""
        held = self._sides[True]
        count = min(EVALUATION_TASKS, len(held))
        return [self.task_of(*one) for one in Random(EVALUATION_SEED).sample(held, count)]

    def _asked(self, answer: str) -> str:
        """Return the right answer to a question, from what its file says."""
        return answer

    def _is_right(self, answer: str, text: str) -> bool:
        wanted = _flat(answer)
        return bool(wanted) and _flat(final_answer(text)) == wanted


class MathEnvironment(ExactEnvironment):
    """Right is what equals the answer, by math-verify."""

    name = "math"

    def __init__(self, data: bytes = b"") -> None:
        """Raises `ConfigError` without math-verify of the one version."""
        require(PACKAGES, extra="math", what=f"the environment {self.name!r}")
        super().__init__(data)
        self._formulas = Formulas()

    def _asked(self, answer: str) -> str:
        return value_of(answer)

    def _is_right(self, answer: str, text: str) -> bool:
        """Return True if what is said is written as the answer, or equals it and is no part."""
        return any(
            are_alike(said, answer)
            or (not is_fragment(said, answer) and self._formulas.equal(answer, said))
            for said in final_answers(text)
        )


def _flat(text: str) -> str:
    """Return a text without the dollar signs around it, and with single blanks."""
    flat = " ".join(text.split())
    is_formula = len(flat) > 1 and flat[0] == flat[-1] == "$" and flat.count("$") == 2
    return flat[1:-1].strip() if is_formula else flat


def _read(data: bytes) -> list[tuple[str, str]]:
    """Questions and answers. Raises `ConfigError` with the numbers of the first bad lines."""
    questions, bad = read_questions(data)
    if bad:
        more = f", and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        raise ConfigError(
            f"a file of questions is bad: {'; '.join(bad[:MAX_NAMED])}{more} ({len(bad):,} of"
            f" {len(bad) + len(questions):,}). shoal envs check math FILE --out GOOD writes a"
            " file without them"
        )
    return questions


def read_questions(
    data: bytes, *, answers_alone: bool = False
) -> tuple[list[tuple[str, str]], list[str]]:
    """Read a file of questions: JSON lines.

    Args:
        data: The file.
        answers_alone: Lines may have no question, and their answer may be called ``gold``.

    Returns:
        Questions with their answers, and a sentence with its number for each line that is bad.

    Raises:
        ConfigError: It is no such file, or too long.
    """
    if data.startswith(PARQUET):
        raise ConfigError(
            "a file of questions is Parquet, and nodes read JSON lines: shoal envs check math"
            " FILE --out GOOD makes them"
        )
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
        try:
            value = _object(line)
            if value is not None and answers_alone:
                value = {"question": f"line {number}", "answer": value.get("gold"), **value}
            if value is not None:
                questions.append(_question(value))
        except ValueError as error:
            bad.append(f"line {number} {error}")
    return questions, bad


def _object(line: bytes) -> dict[str, object] | None:
    """The object of a line; None if it is blank. Raises ValueError, as `_question`."""
    if not line.strip():
        return None
    if len(line) > MAX_LINE:
        raise ValueError(f"has {len(line):,} bytes, at most {MAX_LINE:,}")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("is no JSON object")
    return value


def _question(value: Mapping[str, object]) -> tuple[str, str]:
    """Raises ValueError with the end of a sentence that begins with the line."""
    question, answer = (_text(value, name) for name in ("question", "answer"))
    if not reads_back(answer):
        raise ValueError(f"has an answer that does not read back from a box: {answer!r:.80}")
    return question, answer


def _text(value: Mapping[str, object], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"has no text under {name!r}")
    if len(text) > MAX_LINE:
        raise ValueError(f"has {len(text):,} characters under {name!r}, at most {MAX_LINE:,}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"has half a character under {name!r}") from None
    return text
