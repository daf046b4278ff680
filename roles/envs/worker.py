"""The worker process of an environment: ``python -m roles.envs.worker``.

Foreign code runs here and nowhere in a node: it may raise, hang, eat memory or end the process,
and what it is asked for fails, no more. The first call opens the environment, the others ask
for tasks and rewards, those of a whole submission at once, for the tasks of an evaluation, or
for what people read of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from p2p.errors import ConfigError, MissingDependency
from p2p.node.tables import read_table
from roles.envs.base import Ration, Task
from roles.envs.check import why_not_repeatable
from roles.envs.contained import (
    EnvironmentFailed,
    Payment,
    evaluation_of,
    task_of,
    texts_of,
)
from roles.envs.frames import payment_to_wire, task_from_wire, task_to_wire
from roles.envs.mix import EnvironmentSetup, open_mix
from roles.envs.ration import begin_call, end_calls
from roles.workers.server import serve


class EnvironmentServer:
    """The methods that a node may call."""

    def open(self, setup: dict[str, Any], ration: dict[str, Any]) -> None:
        self._ration = read_table(Ration, ration, "the ration")
        opening = self._ration.opening
        self._long = replace(self._ration, cpu=opening, patience=opening)
        made = read_table(EnvironmentSetup, setup, "the environments")
        self._talking = self._ration.for_turns(made.turns.most if made.turns else 1)
        self._environment = open_mix(made)

    def tasks(self, seeds: list[bytes]) -> list[object]:
        made: list[object] = []
        for seed in seeds:
            begin_call(self._ration)
            made.append(task_to_wire(task_of(self._environment, seed)))
        return made

    def evaluation(self) -> list[object]:
        begin_call(self._long)
        return [task_to_wire(task) for task in evaluation_of(self._environment)]

    def repeats(self) -> str:
        """Return the reason why the environment is not repeatable; empty if it is."""
        begin_call(self._long)
        return why_not_repeatable(self._environment)

    def texts(self, answers: list[Any]) -> list[object]:
        return [
            texts_of(self._environment, *one) for one in self._each("", answers, self._ration)
        ]

    def hear(self, answers: list[Any]) -> list[object]:
        """Return the environment's answers within each completion."""
        return [
            self._environment.hear(*one)
            for one in self._each("respond", answers, self._talking)
        ]

    def rewards(self, answers: list[Any]) -> list[object]:
        payment = Payment()
        for task, tokens in self._each("reward", answers, self._ration):
            payment.pay(self._environment, task, tokens)
        return payment_to_wire(payment)

    def _each(
        self, method: str, answers: list[Any], ration: Ration
    ) -> Iterator[tuple[Task, tuple[int, ...]]]:
        asked = [(task_from_wire(task), completions) for task, completions in answers]
        if method:
            begin_call(self._long)
            self._environment.expect(method, asked)
        for task, completions in asked:
            for tokens in completions:
                begin_call(ration)
                yield task, tuple(tokens)


def main() -> None:
    """Serve one environment on the standard streams."""
    caused = ConfigError, MissingDependency, EnvironmentFailed
    serve(EnvironmentServer(), caused=caused, after=end_calls)


if __name__ == "__main__":
    main()
