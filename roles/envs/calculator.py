"""Products that no small model finds in its head, with a calculator: two turns of text.

``<calc>4821 * 377</calc>`` is answered by the result; a turn without it is the final answer.
The calculator knows whole numbers, ``+ - * //`` and parentheses, computes nothing long, and
says ``error`` to all else. Three turns are enough (``turns = 3, heard = 96``).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from roles.envs.answers import spoken
from roles.envs.text import Message, TextTask, is_held_out

EVALUATION_TASKS: Final = 256
"""Held-out questions: the standard error of a share of them is at most 0.031."""
EVALUATION_SEED: Final = "calculator 4242"
FACTORS: Final = (100, 9999)
"""Of a product, at least and at most."""
MAX_FORMULA: Final = 64
"""Characters of a formula."""
MAX_RESULT: Final = 10**18
"""Of any number on the way, beyond which the calculator says ``error``."""
_ASKED: Final = (
    "What is {0} * {1}? You have a calculator: write <calc>{0} * {1}</calc> and stop, and I"
    " tell you the result. Then say the result and nothing else."
)
_CALL: Final = re.compile(r"<calc>([0-9+\-*/() ]{1,64})</calc>")
_WORDS: Final = re.compile(r"<calc>.*?</calc>", re.DOTALL)
_OPERATIONS: Final[dict[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def calculate(formula: str) -> str:
    """Return the value of a formula of whole numbers, or ``error``, whatever the text."""
    if len(formula) > MAX_FORMULA:
        return "error"
    try:
        return str(_value(ast.parse(formula.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return "error"


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as number) if type(number) is int:
            value = number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            value = _OPERATIONS[type(sign)](_value(left), _value(right))
        case _:
            raise ValueError("it is no formula of whole numbers")
    if abs(value) >= MAX_RESULT:
        raise ValueError("it is too large")
    return value


class CalculatorEnvironment:
    """Multiply with a tool; right or wrong, no partial credit."""

    name = "calculator"

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        """Two factors of three or four digits."""
        return _draw(Random(seed), held_out=held_out)

    async def respond(self, task: TextTask, said: Sequence[str]) -> str | None:
        """The result of the first formula of the last turn; None where there is none."""
        call = _CALL.search(spoken(said[-1]))
        return None if call is None else calculate(call[1])

    async def reward(self, task: TextTask, said: Sequence[str], ended: bool) -> float:
        """1 if the last number of the last turn, outside of calls, is right."""
        words = _WORDS.sub(" ", spoken(said[-1]))
        numbers = re.findall(r"[0-9]+", words.replace(",", ""))
        return 1.0 if ended and numbers and numbers[-1] == task.answer else 0.0

    def evaluation(self) -> list[TextTask]:
        """Held-out products, drawn once for all."""
        rng = Random(EVALUATION_SEED)
        return [_draw(rng, held_out=True) for _ in range(EVALUATION_TASKS)]


def _draw(rng: Random, *, held_out: bool) -> TextTask:
    while True:
        factors = rng.randint(*FACTORS), rng.randint(*FACTORS)
        question = _ASKED.format(*factors)
        if is_held_out(question) == held_out:
            answer = str(factors[0] * factors[1])
            return TextTask((Message("user", question),), "", answer)
