"""The worker process of an environment: ``python -m roles.envs.worker``.

Foreign code runs here and nowhere in a node: it may raise, hang, eat memory or end the process,
and what it is asked for fails, no more. The first frame opens the environment, the others ask
for tasks and rewards, those of a whole submission at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from p2p.errors import ConfigError
from roles.engines import codec
from roles.envs.base import Environment, Ration, Task, open_environment
from roles.envs.contained import EnvironmentFailed, reward_of, task_of
from roles.envs.ration import begin_call, end_calls, limit_memory
from roles.shared.worker_streams import serve_streams


def serve(receive: Callable[[], bytes], send: Callable[[bytes], None]) -> None:
    """Answer frames until the process ends."""
    environment, ration = None, Ration()
    while True:
        method, arguments = codec.decode_request(receive())
        try:
            if environment is None:
                name, *limits = arguments
                ration = Ration(
                    **dict(zip(("memory", "cpu", "patience", "opening"), limits, strict=True))
                )
                limit_memory(ration)
                environment = open_environment(name)
                value: object = None
            else:
                value = call(environment, ration, method, arguments)
        except (ConfigError, EnvironmentFailed) as error:
            send(codec.encode_failure(codec.Failure(type(error).__name__, str(error))))
        else:
            send(codec.encode_reply(value))
        end_calls()


def call(
    environment: Environment, ration: Ration, method: str, arguments: Sequence[Any]
) -> list[object]:
    """What a frame asks for, fit for a frame. Raises `EnvironmentFailed`."""
    values: list[object] = []
    if method == "tasks":
        for seed in arguments[0]:
            begin_call(ration)
            task = task_of(environment, seed)
            values.append([list(task.prompt), list(task.answer)])
        return values
    for prompt, answer, completions in arguments[0]:
        task = Task(tuple(prompt), tuple(answer))
        for tokens in completions:
            begin_call(ration)
            values.append(reward_of(environment, task, tuple(tokens)))
    return values


def main() -> None:
    """Serve one environment on the standard streams."""
    serve_streams(serve)


if __name__ == "__main__":
    main()
