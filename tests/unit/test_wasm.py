"""Code of strangers as wasm: the same everywhere, bounded, and paid by what it does."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from p2p.errors import ConfigError
from roles.envs.base import Ration, make_environment
from roles.envs.code import CodeEnvironment, convert, read_problems
from roles.envs.text import TextTask
from roles.envs.wasm import LIMIT, Interpreter, prepare

pytest.importorskip("wasmtime", reason="code runs as wasm: pip install -e '.[wasm]'")
try:
    prepare()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def python() -> Interpreter:
    return Interpreter("cpython")


def started(which: str, target: str = "", seed: str = "1") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.nasty", which, target]
    env = {**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo" if seed == "1" else "UTC"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def outcomes(process: subprocess.Popen[str]) -> list[Any]:
    said, _ = process.communicate()
    assert process.returncode == 0
    found: list[Any] = json.loads(said)
    return found


@pytest.mark.parametrize("which", ["compact", pytest.param("all", marks=pytest.mark.deep)])
def test_nasty_programs_end_the_same_in_two_processes(which: str) -> None:
    one, other = outcomes(started(which)), outcomes(started(which, seed="2"))
    assert one == other
    assert any(text == LIMIT for text, *_ in one)
    assert any(text != LIMIT for text, *_ in one)


@pytest.mark.deep
def test_nasty_programs_end_the_same_under_another_back_end() -> None:
    """wasmtime's own interpreter stands for another processor."""
    one, other = outcomes(started("compact")), outcomes(started("compact", "pulley64"))
    assert one == other


@pytest.mark.parametrize("kind", ["micropython", "cpython"])
def test_an_interpreter_has_bounds_and_no_world(kind: str) -> None:
    python = Interpreter(kind)
    assert python.run("print(1 + 1)").text == "2\n"
    assert python.run("import sys\nprint(sys.stdin.read())", b"fish").text == "fish\n"
    assert python.run("import sys\nsys.exit(3)").code == 3
    assert "Error" in python.run("open('/etc/passwd')").text
    for program in ("while True: pass", "print('x' * 10**6)"):
        assert (python.run(program).text, python.run(program).code) == (LIMIT, -1)
    assert python.run("print(1)", fuel=1000).text == LIMIT
    for program in ("\0", "\ud800"):
        assert python.run(program).code == 1


def asserted(*lines: str, setup: str = "") -> dict[str, Any]:
    return {"asserts": {"setup": setup, "lines": list(lines)}}


ADD = {
    "question": "Add two numbers.",
    "tests": asserted("assert add(1, 2) == 3", "assert add(-1, 5) == 4"),
    "solution": "def add(a, b):\n    return a + b",
}
ECHO = {"question": "Double a number.", "tests": {"stdin": [["2\n", "4\n"], ["5\n", "10"]]}}


def environment_of(*problems: dict[str, Any]) -> CodeEnvironment:
    lines = [{**one, "question": f"{one['question']} {number}"}
             for number in range(32) for one in problems]  # fmt: skip
    return CodeEnvironment("\n".join(map(json.dumps, lines)).encode())


@pytest.fixture(scope="module")
def adds() -> CodeEnvironment:
    return environment_of(ADD)


async def paid(
    environment: CodeEnvironment, program: str, task: TextTask | None = None
) -> float:
    task = task or environment.task(b"s" * 32)
    return await environment.reward(task, f"So:\n```python\n{program}\n```", True)


async def test_a_program_earns_by_passing_all_tests(adds: CodeEnvironment) -> None:
    task = adds.task(b"s" * 32)
    assert await adds.reward(task, task.answer, True) == 1
    assert await adds.reward(task, task.answer, False) == 0
    assert await paid(adds, "print('noise')\nadd = lambda a, b: a + b") == 1
    for wrong in (
        "add = max",
        "def add(a, b): return 3",
        "def add(a, b): return '3'",
        "",
        "x =",
    ):
        assert await paid(adds, wrong) == 0
    echo = environment_of(ECHO)
    assert await paid(echo, "print(2 * int(input()))") == 1
    assert await paid(echo, "print(4)") == 0
    assert echo.results(echo.task(b"s" * 32), "```\nprint(4)\n```") == [True, False]


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.__stdout__.write('6 6\\n(0, 3)\\n')",
        "import sys\nsys.__stdout__.write('9 9\\n(0, 3)\\n' * 2)\nimport os\nos._exit(0)",
        "import sys\nsys.__stdout__.close()",
        "import builtins\nbuiltins.repr = lambda value: '(0, 3)'\ndef add(a, b): return None",
        "class All(int):\n    def __eq__(self, other): return True\n"
        "def add(a, b): return All(9)",
        "import gc\nfound = [one for one in gc.get_objects() if isinstance(one, tuple) and"
        " 4 in one]\ndef add(a, b): return found[0][0] if found else None",
        "def add(a, b):\n    import __main__\n    return __main__.expected",
        "import sys\ndef add(a, b): return sys._getframe(1).f_locals.get('expected')",
        "def add(a, b):\n    while True: pass",
        "add = lambda a, b: 'x' * 10**7",
        "def add(a, b): return add(b, a)",
        "def add(a, b): return [[]] * 10**5",
        "import re\ndef add(a, b): return re.match('(a+)+$', 'a' * 40 + '!')",
    ],
)
async def test_no_program_earns_by_a_trick(adds: CodeEnvironment, program: str) -> None:
    assert await paid(adds, program) == 0


async def test_a_loop_in_one_test_costs_the_answer_no_more(adds: CodeEnvironment) -> None:
    task = adds.task(b"s" * 32)
    looping = "```python\ndef add(a, b):\n    while a < 0: pass\n    return a + b\n```"
    assert adds.results(task, looping) == [False, False]  # fuel is of the whole answer


async def test_rows_of_public_collections_become_problems() -> None:
    rows: Sequence[dict[str, Any]] = [
        {"task_id": 1, "text": "Add.", "code": ADD["solution"], "test_setup_code": "",
         "test_list": ["assert add(1, 2) == 3"], "challenge_test_list": []},
        {"task_id": 2, "prompt": "Root.", "code": "def root(x): return math.sqrt(x)",
         "test_imports": ["import math"], "test_list": ["assert root(4) == 2.0"]},
        {"task_id": "HumanEval/0", "entry_point": "up", "prompt": "def up(x):\n",
         "canonical_solution": "    return x + 1\n",
         "test": "def check(candidate):\n    assert candidate(1) == 2\n"},
        {"problem_id": 3, "question": "Sum.", "solutions": '["print(3)"]',
         "input_output": '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}', "starter_code": ""},
        {"problem_id": 4, "question": "Sum.", "solutions": '["def plus(a, b): return a + b"]',
         "input_output": '{"fn_name": "plus", "inputs": [[1, 2]], "outputs": [3]}'},
    ]  # fmt: skip
    problems = [convert(row) for row in rows]
    found, bad = read_problems("\n".join(map(json.dumps, problems)).encode())
    assert (len(found), bad) == (5, [])
    for problem in problems:
        environment = environment_of(problem)
        task = environment.task(b"s" * 32)
        assert await environment.reward(task, task.answer, True) == 1
        assert await paid(environment, "x = 1", task) == 0
    with pytest.raises(ValueError, match="neither MBPP"):
        convert({"question": "?"})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        (b"no json", "line 1 is not JSON"),
        (b'{"question": "x"}', "has no tests"),
        (b'{"question": "x", "tests": {"stdin": []}}', "has no tests"),
        (b'{"question": "x", "tests": {"stdin": [[1, 2]]}}', "no pairs"),
        (
            b'{"question": "x", "tests": {"calls": {"function": "a.b", "cases": []}}}',
            "no pairs",
        ),
        (b"[" * 60_000, "is not JSON"),
        (json.dumps(ADD).encode(), "all on one side"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(data: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_environment("code", data=data)


def test_what_is_not_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from roles.envs import wasm

    monkeypatch.setattr(wasm, "WASMTIME", "0.0.1")
    with pytest.raises(ConfigError, match=r"needs wasmtime 0.0.1, installed is"):
        Interpreter("micropython")
    assert Ration().cpu > 4 * 0.75  # fuel of an answer, on a machine of a quarter of the speed


async def test_python_is_a_tool_between_turns() -> None:
    lines = [{"question": f"What is {n} times 977?", "answer": str(n * 977)} for n in range(40)]
    environment = make_environment(
        "math-python", data="\n".join(map(json.dumps, lines)).encode()
    )
    task = environment.task(b"t" * 32)
    asked = f"```python\nprint({task.answer} + 0)\n```"
    assert await environment.respond(task, [asked]) == task.answer
    assert await environment.respond(task, ["```python\nx = 1\n```"]) == "nothing"
    assert await environment.respond(task, ["```python\nwhile True: pass\n```"]) == LIMIT
    final = f"So \\boxed{{{task.answer}}}"
    assert await environment.respond(task, [asked, final]) is None
    assert await environment.reward(task, [asked, final], True) == 1
    assert await environment.reward(task, [f"```\n{final}\n```"], True) == 0
