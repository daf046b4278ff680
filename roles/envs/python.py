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


class ToolEnvironment:
    """Questions as of ``math-exact``, with a tool to find the answer."""

    name: str
    offer: str
    """What a question says of the tool."""

    def __init__(self, questions: bytes) -> None:
        """Raises `ConfigError`, as `ExactEnvironment`."""
        self._questions = ExactEnvironment(questions)

    def call_in(self, said: str) -> str | None:
        """Return the call of the tool in a turn; None if there is none."""
        raise NotImplementedError

    def answer(self, call: str) -> str:
        """Return what the tool says."""
        raise NotImplementedError

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        return self._offered(self._questions.task(seed, held_out=held_out))

    async def respond(self, task: TextTask, said: Sequence[str]) -> str | None:
        call = self.call_in(spoken(said[-1]))
        return None if call is None else self.answer(call)

    async def reward(self, task: TextTask, said: Sequence[str], ended: bool) -> float:
        """Return 1 if the last turn has the right answer, and is no call."""
        if self.call_in(spoken(said[-1])) is not None:
            return 0.0
        return await self._questions.reward(task, said[-1], ended)

    def evaluation(self) -> list[TextTask]:
        return [self._offered(task) for task in self._questions.evaluation()]

    def _offered(self, task: TextTask) -> TextTask:
        (asked,) = task.messages
        return replace(task, messages=(Message(asked.role, asked.content + self.offer),))


class PythonMathEnvironment(ToolEnvironment):
    """Questions as of ``math-exact``, with Python to find the answer."""

    name = "math-python"
    offer = (
        "\nYou may write one ```python block and stop: I run it and tell you what it prints."
    )

    def __init__(self, data: bytes = b"") -> None:
        """Read the questions in ``data``.

        Raises:
            ConfigError: `ExactEnvironment` raises it, or wasmtime is not installed.
        """
        super().__init__(data)
        self._python = Interpreter("cpython")

    def call_in(self, said: str) -> str | None:
        """Return the last code block."""
        return next(reversed(FENCE.findall(said)), None)

    def answer(self, call: str) -> str:
        """Return what a program prints, or "nothing"."""
        return self._python.run(call, fuel=FUEL, output=OUTPUT).text.strip() or "nothing"
