"""Completions of several turns: the environment's answers between them, and their digests.

Only drawn tokens travel. A turn ends at an end token, so the drawn tokens say where turns end;
what stands between them follows from the task and what was drawn before, and whoever replays a
completion computes it again (`hear`). Forged words of a tool have no form on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from p2p.errors import ShoalError
from roles.envs.base import Environment, Task, TurnEnvironment, TurnLimits
from roles.envs.contained import AnswerFailed, call_contained

Heard = tuple[tuple[int, ...] | None, ...]
"""The environment's answer after each turn of a completion. An empty answer ends the
completion. None means that the environment failed: then the completion is over, and void.
"""


def hear(
    environment: Environment,
    task: Task,
    tokens: Sequence[int],
    limits: TurnLimits,
    tell: Callable[[ShoalError, str], None],
) -> Heard:
    """Return the environment's answer to each turn of a completion, finished or growing.

    It is not asked behind the last turn or token that the run allows: the completion is over.
    What it raises goes to ``tell``, with what follows from it.
    """
    said = list[tuple[int, ...] | None]()
    room = limits.heard
    ends = [at for at, token in enumerate(tokens, 1) if token in limits.end_tokens]
    for turn, end in enumerate(ends, 1):
        if turn == limits.most or end == limits.max_new_tokens:
            break
        words = None
        if isinstance(environment, TurnEnvironment) and room:
            ask = partial(environment.respond, task, tokens[:end], room)
            try:
                words = call_contained(environment, "respond", ask)
            except AnswerFailed as error:
                tell(error, "such a completion is over, and void")
                said.append(None)
                break
        if words is None or not 0 < len(words) <= room:
            said.append(())
            break
        said.append(tuple(words))
        room -= len(words)
    return tuple(said)
