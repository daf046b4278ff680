"""Completions of several turns: what the environment says between them, and what that proves.

Only drawn tokens travel. A turn ends at an end token, so the drawn tokens say where turns end;
what stands between them follows from the task and what was drawn before, and whoever replays a
completion computes it again (`hear`). Forged words of a tool have no form on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence

from roles.envs.base import Environment, Task, TurnEnvironment, TurnLimits

Heard = tuple[tuple[int, ...], ...]
"""What the environment says behind each turn of a completion; an empty one: it is over."""


def hear(
    environment: Environment, task: Task, tokens: Sequence[int], limits: TurnLimits
) -> Heard:
    """Ask the environment what it says behind each turn of a completion, whole or under way.

    It is not asked behind the last turn or token that the run allows: the completion is over.
    """
    said = list[tuple[int, ...]]()
    room = limits.heard
    ends = [at for at, token in enumerate(tokens, 1) if token in limits.end_tokens]
    for turn, end in enumerate(ends, 1):
        if turn == limits.most or end == limits.max_new_tokens:
            break
        words = None
        if isinstance(environment, TurnEnvironment) and room:
            words = environment.respond(task, tokens[:end], room)
        if words is None or not 0 < len(words) <= room:
            said.append(())
            break
        said.append(tuple(words))
        room -= len(words)
    return tuple(said)
