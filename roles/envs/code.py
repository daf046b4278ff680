"""Programs that strangers' models write, paid by tests, from a file of problems.

One problem is a line of JSON: ``{"question", "tests", "starter"?, "solution"?}``. Its ``tests``
are of one of three kinds:

- ``calls``: ``{"function": "add", "cases": [[[1, 2], 3], ...]}``, arguments and result as JSON;
- ``stdin``: ``[["1 2\\n", "3\\n"], ...]``, what a program reads and prints;
- ``asserts``: ``{"setup": "import math", "lines": ["assert f(1) == 2", ...]}``.

`convert` makes such lines of public collections. The answer is the last fenced block of
what the model says. It runs in an interpreter of wasm with fuel (`roles.envs.wasm`), so that
every node finds the same. Of ``calls`` and ``stdin`` the expected results stay outside of the
interpreter: a program that looks for them, or forges the driver's lines, earns nothing by it.
An ``assert`` that is ``f(...) == literal`` is made a call; others run beside the answer, which
could fake them, as everywhere. All tests must pass.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final

from p2p.errors import ConfigError
from roles.envs.answers import spoken
from roles.envs.questions import MAX_LINE, MAX_LINES
from roles.envs.text import Message, TextTask, is_held_out
from roles.envs.wasm import LIMIT, Interpreter

MAX_TESTS: Final = 64
"""Tests of a problem that are run: the first."""
MAX_ANSWER: Final = 32 * 1024
"""Most characters of an answer."""
MAX_UNPACKED: Final = 64 * 1024 * 1024
"""Bytes of the private tests of a row."""
EVALUATION_TASKS: Final = 128
EVALUATION_SEED: Final = "code 4242"
FENCE: Final = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_INSTRUCTION: Final = "\nAnswer with one Python program in a ```python block."

_DRIVER: Final = """
import sys
given = eval(sys.stdin.read())
kind, answer, function, cases = given
write = sys.stdout.write
flush = sys.stdout.flush
class Quiet:
    def write(self, text): self.text.append(str(text)); return len(text)
    def flush(self): pass
def said(value):
    text = repr(value)
    write("%d %d\\n%s\\n" % (len(text), len(text.encode()), text))
    flush()
import io
def stdin_case(case):
    out = Quiet(); out.text = []
    sys.stdin, sys.stdout = io.StringIO(case), out
    try: exec(compile(answer, "answer", "exec"), {"__name__": "__main__"})
    except SystemExit: pass
    finally: sys.stdout = sys.__stdout__
    return "".join(out.text)
if kind == "stdin":
    for case in cases:
        try: value = stdin_case(case)
        except BaseException as error: value = (type(error).__name__,)
        said(value)
else:
    names = {"__name__": "answer"}
    out = Quiet(); out.text = []
    sys.stdout = out
    exec(compile(answer, "answer", "exec"), names)
    for case in cases:
        try:
            if kind == "asserts": exec(case, names); value = True
            else: value = (0, names[function](*case))
        except BaseException as error: value = (type(error).__name__,)
        said(value)
"""
"""Reads the answer and what it is given; prints the results, each with its length."""


class CodeEnvironment:
    """Programs that pass all tests, or not."""

    name = "code"

    def __init__(self, data: bytes = b"") -> None:
        """Read the problems in ``data``.

        Raises:
            ConfigError: ``data`` is no file of problems, or wasmtime is not installed.
        """
        problems, bad = read_problems(data)
        if bad or not problems:
            raise ConfigError(
                f"a file of problems is bad: {'; '.join(bad[:5]) or 'it is empty'} (shoal envs"
                " convert makes one)"
            )
        self._sides = {
            side: [one for one in problems if is_held_out(one["question"]) == side]
            for side in (False, True)
        }
        if not all(self._sides.values()):
            raise ConfigError(
                f"the {len(problems)} problems of the environment 'code' are all on one side:"
                " one in eight is held out by its hash, and each side needs at least one"
            )
        self._python = Interpreter("cpython")

    def task(self, seed: bytes, *, held_out: bool = False) -> TextTask:
        """Return the problem whose number follows from the seed."""
        side = self._sides[held_out]
        number = int.from_bytes(hashlib.sha256(seed).digest()[:8], "big")
        return self.task_of(**side[number % len(side)])

    def task_of(
        self, question: str, tests: Any, starter: str = "", solution: str = "", **_: Any
    ) -> TextTask:
        """Return the task of a line of the file."""
        shown = f"\n```python\n{starter}\n```" if starter else ""
        answer = f"```python\n{solution}\n```" if solution else ""
        asked = Message("user", question + shown + _INSTRUCTION)
        return TextTask((asked,), "", answer, json.dumps(tests))

    async def reward(self, task: TextTask, text: str, ended: bool) -> float:
        """Return 1 if the model stopped by itself, and its program passes every test."""
        return 1.0 if ended and all(self.results(task, text)) else 0.0

    def results(self, task: TextTask, text: str) -> list[bool]:
        """Return which tests the program in a text passes."""
        blocks = FENCE.findall(spoken(text))
        tests = _tests(json.loads(task.info))
        if not blocks or len(blocks[-1]) > MAX_ANSWER:
            return [False] * len(tests.expected)
        return run_tests(self._python, blocks[-1], tests)

    def evaluation(self) -> list[TextTask]:
        """Return held-out problems, drawn once for all."""
        held = self._sides[True]
        count = min(EVALUATION_TASKS, len(held))
        return [self.task_of(**one) for one in Random(EVALUATION_SEED).sample(held, count)]


class Tests:
    """A program's inputs, and the outputs that it must give."""

    def __init__(
        self, kind: str, function: str, cases: Sequence[Any], expected: Sequence[Any],
        setup: str = "",
    ) -> None:  # fmt: skip
        self.kind, self.function, self.setup = kind, function, setup
        self.cases, self.expected = list(cases)[:MAX_TESTS], list(expected)[:MAX_TESTS]


def run_tests(python: Interpreter, answer: str, tests: Tests) -> list[bool]:
    """Return which tests an answer passes; each outcome is the same on every machine."""
    program = f"{tests.setup}\n{answer}" if tests.setup else answer
    given = repr((tests.kind, program, tests.function, tests.cases))
    outcome = python.run(_DRIVER, given.encode(errors="replace"))
    found = [] if outcome.text == LIMIT else list(_results(outcome.text))
    if outcome.is_void or outcome.text == LIMIT or len(found) != len(tests.expected):
        return [False] * len(tests.expected)
    return [_is_right(tests, *pair) for pair in zip(found, tests.expected, strict=True)]


def _results(text: str) -> list[str]:
    """Return the results that the driver printed, up to the first other output."""
    found = list[str]()
    while text:
        head, newline, rest = text.partition("\n")
        numbers = head.split(" ")
        if not newline or len(numbers) != 2 or not all(n.isdecimal() for n in numbers):
            return []
        length = int(numbers[0][:9])
        if rest[length : length + 1] != "\n":
            return []
        found.append(rest[:length])
        text = rest[length + 1 :]
    return found


def _is_right(tests: Tests, said: str, expected: Any) -> bool:
    try:
        value = ast.literal_eval(said)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    if tests.kind == "stdin":
        return isinstance(value, str) and value.split() == str(expected).split()
    if tests.kind == "asserts":
        return value is True
    return isinstance(value, tuple) and len(value) == 2 and _equal(value[1], expected)


def _equal(value: Any, expected: Any) -> bool:
    """Compare as Python does, with lists for tuples, which JSON does not know."""
    if isinstance(value, tuple | list) and isinstance(expected, tuple | list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    return (type(value) is type(expected) and bool(value == expected)) or (
        {type(value), type(expected)} == {int, float} and bool(value == expected)
    )  # fmt: skip


def read_problems(data: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the problems of a file, and a sentence about each line that is not a problem."""
    problems, bad = list[dict[str, Any]](), list[str]()
    lines = data.splitlines()
    if len(lines) > MAX_LINES:
        raise ConfigError(f"a file of problems has at most {MAX_LINES:,} lines")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            problems.append(_problem(line))
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            bad.append(f"line {number} {error}")
    return problems, bad


def _problem(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE:
        raise ValueError(f"has {len(line):,} bytes, at most {MAX_LINE:,}")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(value, dict) or not isinstance(value.get("question"), str):
        raise ValueError("has no text under 'question'")
    if not _tests(value.get("tests")).expected:
        raise ValueError("has no tests")
    return value


def _tests(value: Any) -> Tests:
    """Return the tests of a problem.

    Raises:
        ValueError: There is no such kind of tests.
    """
    match value:
        case {"stdin": list(pairs)}:
            if not all(len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
                raise ValueError("has stdin tests that are no pairs of input and output")
            return Tests("stdin", "", [one for one, _ in pairs], [out for _, out in pairs])
        case {"calls": {"function": str(name), "cases": list(cases)}}:
            if not name.isidentifier() or not all(
                len(one) == 2 and isinstance(one[0], list) for one in cases
            ):
                raise ValueError("has calls that are no pairs of arguments and result")
            return Tests("calls", name, [one for one, _ in cases], [out for _, out in cases])
        case {"asserts": {"lines": list(lines), **more}}:
            if not all(isinstance(line, str) for line in lines):
                raise ValueError("has asserts that are no text")
            return _from_asserts(lines, str(more.get("setup", "")))
    raise ValueError("has no tests under 'stdin', 'calls' or 'asserts'")


def _from_asserts(lines: Sequence[str], setup: str) -> Tests:
    """Make ``assert f(1) == 2`` a call if all of them are so."""
    names, cases, expected = set[str](), list[Any](), list[Any]()
    for line in lines:
        try:
            match ast.parse(line.strip()).body:
                case [ast.Assert(test=ast.Compare(
                    left=ast.Call(func=ast.Name(id=name), args=given, keywords=[]),
                    ops=[ast.Eq()], comparators=[wanted]))]:  # fmt: skip
                    names.add(name)
                    cases.append([ast.literal_eval(one) for one in given])
                    expected.append(ast.literal_eval(wanted))
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            break
    if len(cases) == len(lines) and len(names) == 1:
        return Tests("calls", names.pop(), cases, expected, setup)
    return Tests("asserts", "", list(lines), [True] * len(lines), setup)


def convert(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of MBPP, HumanEval, APPS, TACO, LiveCodeBench or GENESYS (SYNTHETIC-1) to a
    problem.

    Raises:
        ValueError: The row has none of these formats.
    """
    match row:
        case {"test_list": list(lines), "code": str(code)}:  # MBPP
            question = str(row.get("prompt") or row.get("text"))
            setup = row.get("test_setup_code") or "\n".join(row.get("test_imports", ()))
            tests: dict[str, Any] = {"asserts": {"setup": setup, "lines": lines}}
            shown = f"{question}\nIt must pass: {lines[0]}"
            return {"question": shown, "tests": tests, "solution": code}
        case {"entry_point": str(name), "prompt": str(prompt), "test": str(test)}:  # HumanEval
            body = f"{test}\ncheck({name})"
            tests = {"asserts": {"lines": [body]}}
            solution = prompt + str(row.get("canonical_solution", ""))
            asked = "Complete this function; write all of it, with its imports."
            return {"question": asked, "starter": prompt, "tests": tests, "solution": solution}
        case {"question": str(question), "input_output": str(text)}:  # APPS, TACO
            pairs = json.loads(text)
            inputs, outputs = pairs["inputs"], pairs["outputs"]
            if pairs.get("fn_name"):
                cases = [list(two) for two in zip(inputs, outputs, strict=True)]
                tests = {"calls": {"function": pairs["fn_name"], "cases": cases}}
            else:
                tests = {"stdin": [list(two) for two in zip(inputs, outputs, strict=True)]}
            known = json.loads(row.get("solutions") or "[]")
            solution = known[0] if known else ""
            return {"question": question, "starter": row.get("starter_code", ""),
                    "tests": tests, "solution": solution}  # fmt: skip
        case {"question_content": str(question), "public_test_cases": str(shown)}:
            # LiveCodeBench
            hidden = _hidden(str(row.get("private_test_cases") or "[]"))
            name = json.loads(str(row.get("metadata") or "{}")).get("func_name", "")
            tests = _from_cases([*json.loads(shown), *hidden], name)
            return {
                "question": question,
                "starter": row.get("starter_code", ""),
                "tests": tests,
            }
        case {"verification_info": str(text), "prompt": str(question)}:  # GENESYS
            if row.get("task_type") != "verifiable_code":
                raise ValueError(f"is {row.get('task_type')!s:.40}, and no verifiable_code")
            cases = json.loads(text)["test_cases"]
            gold = str(row.get("gold_standard_solution") or "")
            solution = (FENCE.findall(gold) or [gold])[-1]
            return {"question": question, "tests": _from_cases(cases, ""), "solution": solution}
    raise ValueError("is a row of neither MBPP, HumanEval, APPS, LiveCodeBench nor GENESYS")


def _from_cases(cases: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the tests of cases with ``input`` and ``output``; those of a function have their
    arguments as JSON, each on a line."""
    name = name or str(cases[0].get("fn_name") or "")
    if not name:
        return {"stdin": [[case["input"], case["output"]] for case in cases]}
    given = [
        [json.loads(line) for line in case["input"].splitlines()]
        if isinstance(case["input"], str)
        else case["input"]
        for case in cases
    ]
    expected = (case["output"] for case in cases)
    results = [json.loads(one) if isinstance(one, str) else one for one in expected]
    return {
        "calls": {"function": name, "cases": list(map(list, zip(given, results, strict=True)))}
    }


class _Plain(pickle.Unpickler):
    """Reads texts and lists; what names a class or a function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"holds {module}.{name}, and no text")


def _hidden(text: str) -> list[Any]:
    """LiveCodeBench's private tests: JSON, or JSON pickled, compressed and in base64."""
    if not text.startswith("["):
        packed = zlib.decompressobj().decompress(base64.b64decode(text), MAX_UNPACKED)
        text = _Plain(io.BytesIO(packed)).load()
    found: list[Any] = json.loads(text)
    return found
