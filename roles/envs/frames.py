"""Messages between a node and the process of its environments, as plain values.

Both ends are this project at one version, but in that process foreign code runs beside ours and
may write into the pipe: what comes from there is read as a stranger's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from p2p.errors import BadMessage
from p2p.wire import fields_untrusted
from roles.contract.core.shape import MAX_CONTEXT
from roles.envs.base import Task
from roles.envs.contained import MAX_READ, Payment
from roles.envs.turns import Heard
from roles.workers.calls import MAX_SAID_UNTRUSTED

ITEMS_AROUND: Final = 16
"""Most items of a reply beside the requested ones."""
TOKENS: Final = 1 << 32
"""Token ids that an engine's content can hold (`roles.engines.codec.TOKEN`)."""


def task_to_wire(task: Task) -> list[object]:
    return [list(task.prompt), list(task.answer), task.source, task.environment, task.kind]


def task_from_wire(value: Sequence[Any]) -> Task:
    prompt, answer, source, environment, kind = value
    return Task(tuple(prompt), tuple(answer), source, environment, kind)


def tasks_untrusted(
    value: object,
    least: int,
    most: int,
    *,
    vocabulary: int = TOKENS,
    context: int = MAX_CONTEXT,
) -> list[Task]:
    """Return the tasks of a reply, of tokens below ``vocabulary`` that fit in a ``context``.

    Raises:
        BadMessage: The reply has other tasks than were asked for.
    """
    listed = _listed_untrusted(value, least, most)
    return [_task_untrusted(one, vocabulary, context) for one in listed]


def texts_untrusted(value: object, count: int) -> list[tuple[str, str]]:
    """Return question and answer of ``count`` completions, cut to the length that people read.

    Raises:
        BadMessage: The reply is not that.
    """
    pairs = (fields_untrusted(one, str, str, what="texts") for one in
             _listed_untrusted(value, count, count))  # fmt: skip
    return [(question[-MAX_READ:], answer[-MAX_READ:]) for question, answer in pairs]


def heard_untrusted(
    value: object, count: int, *, most: int, vocabulary: int = TOKENS
) -> list[Heard]:
    """Return the answers within ``count`` completions, with at most ``most`` tokens in each.

    Raises:
        BadMessage: The reply is not that.
    """
    found = list[Heard]()
    for said in _listed_untrusted(value, count, count):
        has_failed = isinstance(said, list) and said[-1:] == [None]
        said = said[:-1] if has_failed else said
        if not isinstance(said, list) or not all(isinstance(words, list) for words in said):
            raise BadMessage("what is said within a completion is a list of lists")
        tokens = [token for words in said for token in words]
        if len(tokens) > most:
            raise BadMessage(f"a completion hears {len(tokens)} tokens, over {most}")
        if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
            raise BadMessage(f"what is said has token ids below {vocabulary:,}")
        if not all(said if has_failed else said[:-1]):
            raise BadMessage("something is said behind the end of a completion")
        found.append((*map(tuple, said), *([None] if has_failed else ())))
    return found


def payment_to_wire(payment: Payment) -> list[object]:
    words = payment.place[:MAX_SAID_UNTRUSTED], payment.said[:MAX_SAID_UNTRUSTED]
    failed = [at for at, has_failed in enumerate(payment.failed) if has_failed]
    return [payment.rewards, failed, *words]


def payment_untrusted(value: object, count: int) -> Payment:
    """Return the rewards of ``count`` completions, each from 0 to 1.

    Raises:
        BadMessage: The reply is not that.
    """
    paid, failed, place, said = fields_untrusted(value, list, list, str, str, what="payment")
    rewards = _listed_untrusted(paid, count, count)
    for reward in rewards:
        if type(reward) is not float or not (math.isfinite(reward) and 0.0 <= reward <= 1.0):
            raise BadMessage(f"a reward is a number from 0 to 1, not {reward!r:.40}")
    if not all(type(at) is int and 0 <= at < count for at in failed):
        raise BadMessage(f"not all answers that were raised on are among {count}")
    flags = [False] * count
    for at in failed:
        flags[at] = True
    return Payment(rewards, flags, place[:MAX_SAID_UNTRUSTED], said[:MAX_SAID_UNTRUSTED])


def _task_untrusted(value: object, vocabulary: int, context: int) -> Task:
    prompt, answer, source, environment, kind = fields_untrusted(
        value, list, list, bytes, str, str, what="task"
    )
    if not all(type(token) is int and 0 <= token < vocabulary for token in (*prompt, *answer)):
        raise BadMessage(f"a task's prompt and answer are token ids below {vocabulary:,}")
    if len(prompt) + len(answer) > context:
        raise BadMessage(f"a task has more tokens than the model's context of {context:,}")
    if not prompt:
        raise BadMessage("a task's prompt is empty: there is nothing to go on from")
    return Task(tuple(prompt), tuple(answer), source, environment, kind)


def _listed_untrusted(value: object, least: int, most: int) -> list[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise BadMessage(f"a reply lists {least} to {most} answers to what was asked")
    return value


def sentence_untrusted(value: object) -> str:
    """Return a sentence, empty if there is nothing to say.

    Raises:
        BadMessage: The reply is not a sentence.
    """
    (sentence,) = fields_untrusted([value], str, what="sentence")
    return str(sentence)[:MAX_SAID_UNTRUSTED]
