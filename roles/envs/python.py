"""Questions with answers from a file, and Python as a tool: several turns of text.

The model may end a turn with a fenced block of Python; what the program prints is the answer of
the environment, and the model goes on. A turn without a block is the final answer, compared as
in ``math-exact``. Each program runs alone (`roles.envs.wasm`): nothing is left of the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from roles.envs.answers import spoken
from roles.envs.code import FENCE
from roles.envs.questions import ExactEnvironment
from roles.envs.text import Message, TextTask
from roles.envs.wasm import Interpreter

FUEL: Final = 2_000_000_000
"""Fuel of one program."""
OUTPUT: Final = 4096
"""Bytes that one program may print; what an answer has room for is far less."""
_OFFER: Final = (
    "\nYou may write one ```python block and stop: I run it and tell you what it prints."
)


class PythonMathEnvironment:
    """Questions as of ``math-exact``, with Python to find the answer."""

    name = "math-python"

    def __init__(self, data: bytes = b"") -> None:
        """Read the questions in ``data``.

        Raises:
            ConfigError: `ExactEnvironment` raises it, or wasmtime is not installed.
        """
        self._questions = ExactEnvironment(data)
        self._python = Interpreter("cpython")

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        return _offered(self._questions.task(seed, held_out=held_out))

    async def respond(self, task: TextTask, said: Sequence[str]) -> str | None:
        """Run the last code block of the last turn and return its output, or "nothing" if it
        prints nothing. Return None if there is no block."""
        blocks = FENCE.findall(spoken(said[-1]))
        if not blocks:
            return None
        return self._python.run(blocks[-1], fuel=FUEL, output=OUTPUT).text.strip() or "nothing"

    async def reward(self, task: TextTask, said: Sequence[str], ended: bool) -> float:
        """Return 1 if the last turn has the right answer, and is no program."""
        if FENCE.search(spoken(said[-1])):
            return 0.0
        return await self._questions.reward(task, said[-1], ended)

    def evaluation(self) -> list[TextTask]:
        return [_offered(task) for task in self._questions.evaluation()]


def _offered(task: TextTask) -> TextTask:
    (asked,) = task.messages
    return replace(task, messages=(Message(asked.role, asked.content + _OFFER),))
