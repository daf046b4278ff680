"""The worker process of an environment: ``python -m roles.envs.worker``.

Foreign code runs here and nowhere in a node: it may raise, hang, eat memory or end the process,
and what it is asked for fails, no more. The first frame opens the environment, the others ask
for tasks and rewards, those of a whole submission at once, for the tasks of an evaluation, or
for what people read of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from p2p.errors import ConfigError, MissingDependency
from roles.engines import codec
from roles.envs.base import Environment, Ration
from roles.envs.check import why_not_repeatable
from roles.envs.contained import EnvironmentFailed, Payment, evaluation_of, task_of, texts_of
from roles.envs.frames import payment_to_wire, setup_from_wire, task_from_wire, task_to_wire
from roles.envs.mix import open_mix
from roles.envs.ration import begin_call, end_calls
from roles.workers.streams import serve_streams


def serve(receive: Callable[[], bytes], send: Callable[[bytes], None]) -> None:
    """Answer frames until the process ends."""
    environment, ration = None, Ration()
    while True:
        method, arguments = codec.decode_request(receive())
        try:
            if environment is None:
                setup, limits = arguments
                ration = Ration(**limits)
                environment = open_mix(setup_from_wire(setup))
                value: object = None
            else:
                value = call(environment, ration, method, arguments)
        except (ConfigError, MissingDependency, EnvironmentFailed) as error:
            send(codec.encode_failure(codec.Failure(type(error).__name__, str(error))))
        else:
            send(codec.encode_reply(value))
        end_calls()


def call(
    environment: Environment, ration: Ration, method: str, arguments: Sequence[Any]
) -> list[object]:
    """What a frame asks for, fit for a frame. Raises `EnvironmentFailed`."""
    values: list[object] = []
    match method, arguments:
        case "tasks", [seeds]:
            for seed in seeds:
                begin_call(ration)
                values.append(task_to_wire(task_of(environment, seed)))
        case "evaluation", []:
            begin_call(replace(ration, cpu=ration.opening, patience=ration.opening))
            values += map(task_to_wire, evaluation_of(environment))
        case "repeats", []:
            begin_call(replace(ration, cpu=ration.opening, patience=ration.opening))
            values.append(why_not_repeatable(environment))
        case "texts", [answers]:
            for task, completions in answers:
                for tokens in completions:
                    begin_call(ration)
                    values.append([*texts_of(environment, task_from_wire(task), tuple(tokens))])
        case "rewards", [answers]:
            payment = Payment()
            for task, completions in answers:
                asked = task_from_wire(task)
                for tokens in completions:
                    begin_call(ration)
                    payment.pay(environment, asked, tuple(tokens))
            values += payment_to_wire(payment)
        case _:
            raise TypeError(
                f"an environment has no method {method}({len(arguments)} arguments)"
            )
    return values


def main() -> None:
    """Serve one environment on the standard streams."""
    serve_streams(serve)


if __name__ == "__main__":
    main()
