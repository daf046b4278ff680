"""Laws of every sound environment, tried on its own tasks.

A reward is a function of task and text: the same call pays the same. A right answer earns a
full reward, a fragment of it nothing, and no constant text more than half on the tasks of a
kind. A model that is rewarded otherwise learns the fault, and a validator whose rewards do not
repeat would seem to lie.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import trio

from roles.envs.answers import is_fragment, key
from roles.envs.base import Task, TurnEnvironment
from roles.envs.contained import EnvironmentFailed, call_contained
from roles.envs.text import TextEnvironment, TextTask, TokenizedEnvironment, is_turns

REPEATED: Final = 64
"""Tasks of an evaluation whose rewards are computed twice."""
ROOM: Final = 64
"""Tokens that may be said behind a turn."""
SEEDS: Final = 4
"""Seeds whose tasks are made twice."""
MOST_FRAGMENTS: Final = 24
"""Fragments of one answer that are tried."""
_HALF: Final = 0.5
"""Most that a fragment may earn if nearly right answers earn something, and a constant on
average.
"""
CONSTANTS: Final = (
    "", "0", "1", "-1", "2", "0.5", "nan", "inf", "-inf", "x", "A", "True", "False", "Yes",
    "No", "None", "[]", "{}", "()", "1=2", "x=x+1", "no idea",
)  # fmt: skip
"""Texts that say nothing of a task. The commonest answer of each kind is tried beside them."""
SAMPLE: Final = 64
"""Tasks of a kind on which each constant is tried."""
FEWEST: Final = 16
"""Tasks of a kind of which a constant can be said to earn more than half."""
UNITS: Final = " $\N{DEGREE SIGN}%"
"""Signs around an answer without which it says as much."""
_FORMS: Final = (r"\boxed{{{}}}", "<answer>{}</answer>", "{}")
"""Forms of an answer. An answer is tried in the first form that its environment reads."""
_PIECES: Final = (
    re.compile(r"-?\d+(?:\.\d+)?"),
    re.compile(r"[^=<>,;]+"),
    re.compile(r"[^-+=<>*/]+"),
    re.compile(r"[{(\[]([^{}()\[\]]+)[})\]]"),
    re.compile(r"\\?[A-Za-z]+"),
)


def why_not_repeatable(environment: Any) -> str:
    """Make tasks and rewards twice, of an environment of text, of tokens, or of a mix.

    Returns:
        A sentence if they differ, else None. An error that repeats is the same for all nodes.
    """
    parts = getattr(environment, "environments", None)  # of a mix
    for part in [environment] if parts is None else parts.values():
        plain = part.plain if isinstance(part, TokenizedEnvironment) else part
        if what := _difference(plain):
            return (
                f"the environment {plain.name!r} {what}: it depends on more than its arguments"
                " (a clock, chance, or earlier calls), so nodes would disagree about honest"
                " work; its author must mend it"
            )
    return ""


def _difference(environment: Any) -> str:
    for number in range(SEEDS):
        make = partial(environment.task, bytes([number]) * 32)
        if _outcome(environment, make) != _outcome(environment, make):
            return "makes two tasks of one seed"
    tasks = _outcome(environment, environment.evaluation)
    if isinstance(tasks, str):
        return ""
    tried = tasks[:: max(1, len(tasks) // REPEATED)][:REPEATED]
    expect(environment, [(task, said) for task in tried for said in _sayings(task)], talks=True)
    for task in tried:
        for said in _sayings(task):
            for what, call in (("pays", _paid), ("says", _heard)):
                first, second = (repr(call(environment, task, said)) for _ in range(2))
                if first != second:  # as text: one nan is no other
                    return f"{what} {first:.200}, and then {second:.200}, for one answer"
    return ""


def expect(
    environment: Any, answers: Sequence[tuple[Any, Any]], *, talks: bool = False
) -> None:
    """Let an environment that prefers calls in bulk prepare rewards and, if it ``talks``,
    answers."""
    if not hasattr(environment, "expect"):
        return
    is_one = not is_turns(environment)
    environment.expect(("reward", task, said if is_one else (said,), True)
                       for task, said in answers)  # fmt: skip
    if talks and not is_one:
        environment.expect(("respond", task, (said,)) for task, said in answers)


def sample(environment: Any, tasks: Sequence[Any]) -> tuple[str, list[tuple[str, float]]]:
    """Return the prompt of the first task, and the best and the worst paid of some answers to
    it, each with its reward, as people read them."""
    task = tasks[0]
    paid = {said: _paid(environment, task, said)
            for said in (*_sayings(task)[:-1], *_sayings(tasks[-1])[:-1])}  # fmt: skip
    earned = {said: one for said, one in paid.items() if isinstance(one, float)}
    pay = earned.__getitem__
    ends = [max(earned, key=pay), min(reversed(earned), key=pay)] if earned else []
    if isinstance(task, TextTask):
        asked = "\n".join(message.content for message in task.messages)
        return asked, [(said, earned[said]) for said in ends]
    signs = getattr(environment, "vocabulary", "")

    def read(tokens: Sequence[int]) -> str:
        return "".join(signs[one] for one in tokens) if signs else str(tokens)

    return read(task.prompt), [(read(said), earned[said]) for said in ends]


def _sayings(task: Any) -> tuple[Any, ...]:
    if isinstance(task, TextTask):
        return (*(form.format(task.answer) for form in _FORMS), "")
    return task.answer, task.prompt, ()


def _paid(environment: Any, task: Any, said: Any) -> float | str:
    """Return a reward, or the error that it raises."""

    def pay() -> float:
        if isinstance(task, TextTask):
            words = (said,) if is_turns(environment) else said
            return float(trio.run(environment.reward, task, words, True))
        return float(environment.reward(task, said))

    paid: float | str = _outcome(environment, pay)
    return paid


def _heard(environment: Any, task: Any, said: Any) -> Any:
    """Return the environment's answer to a turn, or the error that it raises; None in an
    environment of one turn."""
    if isinstance(environment, TurnEnvironment) and isinstance(task, Task):
        return _outcome(environment, partial(environment.respond, task, said, ROOM))
    if is_turns(environment):
        return _outcome(environment, partial(trio.run, environment.respond, task, (said,)))
    return None


def _outcome(environment: Any, work: Callable[[], Any]) -> Any:
    """Return the result of a call of an environment, or its error in words."""
    try:
        return call_contained(environment, "call", work)
    except EnvironmentFailed as error:
        return str(error)


@dataclass(slots=True)
class Report:
    """Findings of `check_rewards`, each as a sentence."""

    tasks: int = 0
    without_answer: int = 0
    """Tasks whose environment names no answer, since many are right."""
    earns_nothing: list[str] = field(default_factory=list)
    """Right answers that do not earn a full reward."""
    pays_fragments: list[str] = field(default_factory=list)
    pays_constants: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Return all findings as sentences."""
        return [
            *(f"does not earn itself: {one}" for one in self.earns_nothing),
            *(f"pays a fragment: {one}" for one in self.pays_fragments),
            *(f"pays a constant: {one}" for one in self.pays_constants),
        ]


def check_rewards(
    environment: TextEnvironment,
    tasks: Sequence[TextTask],
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> Report:
    """Pay for right answers, for their fragments, and for constant texts.

    Args:
        environment: One of text.
        tasks: Those that are tried, each with its answer.
        progress: Told after each task how many of how many are done.
    """
    report = Report(tasks=len(tasks))
    expect(environment, [(task, form.format(said)) for task in tasks for form in _FORMS
                         for said in (task.answer, *fragments(task.answer))])  # fmt: skip
    kinds: dict[str, list[tuple[TextTask, str]]] = defaultdict(list)
    for done, task in enumerate(tasks, 1):
        form = _form(environment, task)
        kinds[task.kind].append((task, form or _FORMS[0]))
        if task.answer in ("", "None"):
            report.without_answer += 1
            continue
        if not form:
            report.earns_nothing.append(_named(task))
        report.pays_fragments += (
            f"{_named(task)} pays {part!r:.40}"
            for part in fragments(task.answer)
            if _earns(environment, task, (form or _FORMS[0]).format(part)) > _HALF
        )
        progress(done, len(tasks))
    for kind, some in kinds.items():
        if len(some) < FEWEST:
            continue
        sample = some[:: max(1, len(some) // SAMPLE)]
        commonest = Counter(task.answer for task, _ in some).most_common(1)[0][0]
        constants = dict.fromkeys((*CONSTANTS, commonest))
        expect(environment, [(task, form.format(constant)) for task, form in sample
                             for constant in constants])  # fmt: skip
        for constant in constants:
            paid = [_earns(environment, task, form.format(constant)) for task, form in sample]
            if sum(paid) > _HALF * len(paid):
                where = f" on {kind}" if kind else ""
                earned = sum(paid) / len(paid)
                report.pays_constants.append(f"{constant!r:.40} earns {earned:.2f}{where}")
    return report


def _form(environment: TextEnvironment, task: TextTask) -> str:
    """Return the form in which a task's answer earns a full reward; empty if there is none."""
    for form in _FORMS:
        if _earns(environment, task, form.format(task.answer)) == 1:
            return form
    return ""


def fragments(answer: str) -> list[str]:
    """Return parts of an answer that say less than the whole."""
    answer = answer.strip(UNITS)
    parts = (part for pattern in _PIECES for part in pattern.findall(answer))
    ends = (end for at in _places(answer) for end in (answer[:at], answer[at:]))
    found = dict.fromkeys(part.strip(" $") for part in (*parts, *ends))
    return [part for part in found if key(part) and is_fragment(part, answer)][:MOST_FRAGMENTS]


def _places(answer: str) -> Iterator[int]:
    """Yield where an answer can be cut without a brace that is left open."""
    depth = 0
    for at, sign in enumerate(answer):
        if depth == 0 and at and answer[at - 1] != "\\" and not sign.isalpha():
            yield at
        depth += (sign in "{([") - (sign in "})]")


def _earns(environment: TextEnvironment, task: TextTask, said: str) -> float:
    paid = _paid(environment, task, said)
    return paid if isinstance(paid, float) else 0.0


def _named(task: TextTask) -> str:
    asked = task.messages[-1].content.partition("\n")[0]
    return f"{asked[:40]}: {task.answer!r:.60}"
