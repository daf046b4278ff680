"""An environment, examined in two processes that differ in all that must not matter.

``python -m roles.envs.examine`` makes tasks of one environment, pays for answers that strangers
may give, and answers turns; it prints what came of each call, how long it took, and what the
environment's own code reached for on the way. `examine` runs it twice, with another hash seed,
time zone, folder and order of calls, and compares. It takes some seconds.

The watch over what code reaches for (files, clocks, unseeded random numbers, text that is
evaluated) helps authors, and defends nobody: a run's processes are contained by other means.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, Final

import trio

from roles.envs.base import Ration, Task, environment_places, make_environment
from roles.envs.check import expect
from roles.envs.contained import EnvironmentFailed, call_contained
from roles.envs.ration import begin_call, end_calls
from roles.envs.text import TextTask, is_text, is_turns

TASKS: Final = 24
"""Tasks whose answers are paid."""
QUESTIONS: Final = 512
"""Tasks that are drawn to see which are held out, and how many there are."""
FEWEST: Final = 16
"""Different questions of `QUESTIONS`, at least."""
SLOW: Final = 1.0
"""CPU seconds of one call: a submission of 128 answers has to be paid within 30."""
BRIEF: Final = Ration()
LONG: Final = Ration(cpu=30.0, patience=120.0)
"""For the tasks of an evaluation: a quarter of what a node allows (`Ration.opening`)."""
DRAWING: Final = 2.0
"""CPU seconds after which no more of `QUESTIONS` are drawn."""
BEFORE: Final = 8
"""Characters before an answer that stands in its question: the same in all, they give it away;
a choice that is offered stands behind others."""
METHODS: Final = ("task", "evaluation", "reward", "respond")
STRANGE: Final = (
    "", " ", "\n\t", "0", "9" * 5000, "(" * 3000, "-" * 2000 + "1", "\0", "\ud800",
    "<|im_end|>", "a" * 28 + "!", "</think>", r"\boxed{}", r"\boxed{" * 500,
    "<answer></answer>", "__import__('os').getcwd()", "1/0", "1e999", "nan", "\N{FISH}" * 100,
)  # fmt: skip
"""Answers as strangers may give them. Beside them the right answer is tried: alone, twice, and
in a sentence.
"""
_SETTINGS: Final = ({"PYTHONHASHSEED": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8"},
                    {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo", "LC_ALL": "C"})  # fmt: skip


def examine(name: str, data: Path | None = None, kinds: Mapping[str, float] = {}) -> list[str]:
    """Examine an environment, and return a sentence for each fault, with the line where it is
    known. None are good.

    Args:
        name: Name of the environment in a run file.
        data: File of questions that the environment reads.
        kinds: Weights of its kinds of tasks; none: its own.
    """
    with Examiner(name, data) as examiner:
        return examiner.examine(kinds)


class Examiner:
    """Two processes for one environment, so that many kinds of its tasks can be examined after
    one start."""

    def __init__(self, name: str, data: Path | None = None) -> None:
        self._asked = [name, str(data.absolute()) if data else ""]
        self._stack = ExitStack()
        self._children: list[tuple[Any, IO[str]] | None] = [None] * len(_SETTINGS)

    def __enter__(self) -> Examiner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def examine(self, kinds: Mapping[str, float]) -> list[str]:
        """Return the faults in tasks of these kinds, as `examine` does."""
        seen = list[dict[str, Any]]()
        for number in range(len(_SETTINGS)):
            seen.append(self._ask(number, kinds))
            if "died" in seen[-1]:
                return [seen[-1]["died"]]
        one, other = seen
        faults = list(one["faults"])
        sources = [f" ({what} at {where})" for what, where in one["reached"].items()]
        theirs = other["calls"]
        differ = [call for call, came in one["calls"].items() if theirs.get(call, came) != came]
        if differ:
            more = f" and {len(differ) - 1} more calls" if len(differ) > 1 else ""
            faults.append(
                f"{differ[0]}{more} had another result in another process: it depends on the"
                " clock, on chance, on the order of a set or on earlier calls"
                f"{''.join(sources) or one['lines'].get(re.split('[ (]', differ[0])[0], '')}"
            )
        elif one["reached"]:
            faults += [
                f"it reaches for {what} at {where}" for what, where in one["reached"].items()
            ]
        return faults

    def _ask(self, number: int, kinds: Mapping[str, float]) -> dict[str, Any]:
        child, said = self._children[number] = self._children[number] or self._start(number)
        child.stdin.write(json.dumps([*self._asked, dict(kinds), number]) + "\n")
        child.stdin.flush()
        if reply := child.stdout.readline():
            found: dict[str, Any] = json.loads(reply)
            return found
        self._children[number] = None
        said.seek(0)
        *_, last = ["", *said.read().strip().splitlines()]
        return {"died": f"its process ended (exit {child.wait()}): {last[-300:]}"}

    def _start(self, number: int) -> tuple[Any, IO[str]]:
        folder = self._stack.enter_context(TemporaryDirectory())
        said = self._stack.enter_context(TemporaryFile("w+", errors="replace"))  # noqa: SIM115
        child = subprocess.Popen(
            [sys.executable, "-m", "roles.envs.examine"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
            env={**os.environ, **_SETTINGS[number], "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=folder,
        )  # fmt: skip
        self._stack.enter_context(child)
        self._stack.callback(child.kill)
        return child, said


_HERE: Final = str(Path(__file__).parent)


class _Watch:
    """Records forbidden accesses of the environment's own code."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places, self.reached = tuple(places), dict[str, str]()
        self.on, self.text = False, ""
        sys.addaudithook(self._audit)
        for module, names in ((time, ("time", "time_ns", "monotonic", "perf_counter")),
                              (random, ("random", "randint", "choice", "shuffle", "seed")),
                              (os, ("urandom", "getpid"))):  # fmt: skip
            for name in names:
                setattr(module, name, self._wrapped(getattr(module, name), module.__name__))

    def _wrapped(self, call: Callable[..., Any], module: str) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            self._note(f"{module}.{call.__name__}", depth=2)
            return call(*arguments, **named)

        return watched

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in ("open", "os.system", "subprocess.Popen", "socket.__new__", "os.listdir"):
            self._note(event)
        elif event == "compile" and len(self.text) > 3:
            source = arguments[0]
            source = source.decode(errors="replace") if isinstance(source, bytes) else source
            if isinstance(source, str) and self.text in source:
                self._note("the evaluation of an answer")

    def _note(self, what: str, depth: int = 2) -> None:
        frame: Any = sys._getframe(depth)
        while self.on and frame is not None:
            file = frame.f_code.co_filename
            if "importlib" in file:
                return
            if file.startswith(self._places) and not file.startswith(_HERE):
                self.reached.setdefault(what, f"{file}:{frame.f_lineno}")
                return
            frame = frame.f_back


class _Trial:
    """The calls of one process."""

    def __init__(self, environment: Any, watch: _Watch) -> None:
        self._environment, self._watch = environment, watch
        self.calls, self.faults = dict[str, str](), dict[str, str]()

    def run(self, is_reversed: bool) -> None:
        """Make tasks, pay and answer twice. The first calls find faults, the second must give
        the same results."""
        seeds = [hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(QUESTIONS)]
        ahead = getattr(self._environment, "expect", lambda calls: None)
        ahead(("task", seed, False) for seed in seeds)
        tasks, until = list[Any](), time.process_time() + DRAWING
        for n, seed in enumerate(seeds):
            if n < TASKS or time.process_time() < until:
                tasks.append(self._call(f"task({n})", self._environment.task, seed))
        held = self._call("evaluation()", self._environment.evaluation, ration=LONG)
        if self.faults:
            return
        learnt, kept = ({_asked(task) for task in some} for some in (tasks, held))
        if both := learnt & kept:
            self._find("not held out", f"{len(both)} of {len(kept)} held-out questions are also"
                       f" trained on, such as {min(both, key=len)[:80]!r}")  # fmt: skip
        if len(learnt) < FEWEST:
            self._find("few", f"{len(tasks)} seeds make {len(learnt)} different questions")
        some = tasks[:TASKS]
        if is_text(self._environment):
            before = {_asked(task).rpartition(task.answer or "?")[0][-BEFORE:] for task in some}
            if len(before) == 1 and before != {""}:
                self._find("in the question", f"the answer stands in every question, behind"
                           f" {before.pop()!r}")  # fmt: skip
        order = [
            (f"of task {n} and answer {at}, {str(said)[:40]!r}", task, said)
            for n, task in enumerate(some)
            for at, said in enumerate(_sayings(task))
        ]
        order = order[::-1] if is_reversed else order
        expect(self._environment, [(task, said) for _, task, said in order], talks=True)
        for label, task, said in order:
            self._watch.text = said if isinstance(said, str) and said in STRANGE else ""
            words = (said,) if is_turns(self._environment) else said
            self._pay(f"reward {label}", task, words)
            if is_turns(self._environment):
                self._call(f"respond {label}", self._environment.respond, task, words)

    def _pay(self, label: str, task: Any, said: Any) -> None:
        more = (True,) if isinstance(task, TextTask) else ()
        paid = self._call(label, self._environment.reward, task, said, *more)
        if paid is not None and not (isinstance(paid, int | float) and 0 <= paid <= 1):
            where = _line_of(self._environment, "reward")
            self._find("reward", f"{label} is {paid!r:.40}: it must be from 0 to 1{where}")

    def _call(
        self, label: str, call: Callable[..., Any], *arguments: Any, ration: Ration = BRIEF
    ) -> Any:
        sys.stderr.write(f"at {label[:200]!a}\n")
        sys.stderr.flush()
        begin_call(ration)
        start = time.process_time()
        self._watch.on = True
        try:
            is_async = call.__name__ in ("reward", "respond") and is_text(self._environment)
            run = partial(trio.run if is_async else _plain, call, *arguments)
            value = call_contained(self._environment, "call", run)
            came = repr(value)
        except EnvironmentFailed as error:
            came, value = str(error), None
            self._find("raises", f"{label} raises: {error}")
        finally:
            self._watch.on = False
            end_calls()
        spent = time.process_time() - start
        if spent > (most := SLOW if ration is BRIEF else ration.cpu):
            self._find("slow", f"{label} takes {spent:.1f} CPU s, over {most:g}")
        self.calls[label] = hashlib.sha256(came.encode(errors="replace")).hexdigest()[:16]
        return value

    def _find(self, kind: str, said: str) -> None:
        self.faults.setdefault(kind, said)


def _line_of(environment: Any, method: str) -> str:
    code = getattr(getattr(environment, method, None), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""


def _plain(call: Callable[..., Any], *arguments: Any) -> Any:
    return call(*arguments)


def _asked(task: Any) -> str:
    if isinstance(task, Task):
        return repr(task.prompt)
    return "\n".join(message.content for message in task.messages)


def _sayings(task: Any) -> tuple[Any, ...]:
    if isinstance(task, Task):
        return task.answer, task.answer * 2, (), (0,), tuple(task.prompt), (7,) * 500
    right = task.answer
    asked = _asked(task)
    return *STRANGE, right, right * 2, f"It is {right}.", rf"\boxed{{{right}}}", asked


def main() -> None:
    """Examine the kinds of an environment that each line of standard input names, and print
    what came of them."""
    watch: _Watch | None = None
    reply, sys.stdout = sys.stdout, sys.stderr  # an environment may print
    for line in sys.stdin:
        name, data, kinds, number = json.loads(line)
        options: dict[str, Any] = {"kinds": kinds} if kinds else {}
        if data:
            options["data"] = Path(data).read_bytes()
        sys.stderr.write("at its class\n")
        environment = make_environment(name, **options)
        places = (
            *environment_places(name),
            sys.modules[type(environment).__module__].__file__ or "",
        )
        watch = watch or _Watch([place for place in places if place])
        watch.reached = {}
        trial = _Trial(environment, watch)
        trial.run(is_reversed=bool(number))
        found = {
            "faults": list(trial.faults.values()),
            "calls": trial.calls,
            "reached": watch.reached,
            "lines": {one: _line_of(environment, one) for one in METHODS},
        }
        reply.write(json.dumps(found) + "\n")
        reply.flush()


if __name__ == "__main__":
    main()
