"""The environments of text that come with Shoal: tasks, rewards, what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
import trio

from p2p.errors import ConfigError
from roles.envs import installed, questions
from roles.envs.arithmetic import EVALUATION_TASKS, MIX, ArithmeticEnvironment
from roles.envs.base import Task, environment_digest
from roles.envs.gym import GymEnvironment
from roles.envs.questions import ExactEnvironment, MathEnvironment
from roles.envs.sort import SortEnvironment, encode
from roles.envs.text import Message, TextEnvironment, TextTask, is_held_out
from tests.support.packages import needs_gym

DATA = b"".join(
    json.dumps({"question": f"What is half of {number}?", "answer": f"{number}/2"}).encode()
    + b"\n"
    for number in range(100)
)
MAKERS: dict[str, Callable[[], TextEnvironment]] = {
    "arithmetic": ArithmeticEnvironment,
    "math-exact": lambda: ExactEnvironment(DATA),
    "math": lambda: MathEnvironment(DATA),
}
every = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def paid(environment: TextEnvironment, task: TextTask, text: str, ended: bool = True) -> float:
    return trio.run(environment.reward, task, text, ended)


def asked(task: TextTask) -> str:
    return task.messages[0].content.removesuffix(questions._INSTRUCTION)


@every
def test_tasks_follow_from_their_seed_and_no_held_out_one_is_trained_on(
    make: Callable[[], TextEnvironment],
) -> None:
    one, other = make(), make()
    held = {asked(task) for task in one.evaluation()}
    rng = Random(0)
    trained = set()
    for _ in range(2000):
        seed = rng.randbytes(32)
        task = one.task(seed)
        assert task == other.task(seed)
        assert not is_held_out(asked(task))
        trained.add(asked(task))
        assert is_held_out(asked(one.task(seed, held_out=True)))
    assert not trained & held
    assert all(is_held_out(question) for question in held)


@every
def test_the_answer_is_paid_if_the_model_stops_by_itself(
    make: Callable[[], TextEnvironment],
) -> None:
    environment = make()
    for task in environment.evaluation()[::16]:
        assert paid(environment, task, f" {task.answer}") == 1.0
        assert paid(environment, task, f" {task.answer}", ended=False) == 0.0
        assert paid(environment, task, "") == 0.0
        assert paid(environment, task, " no idea 123456789") == 0.0


def test_kinds_come_by_weight_and_all_are_measured() -> None:
    environment, rng = ArithmeticEnvironment(), Random(2)
    counts = Counter(environment.task(rng.randbytes(32)).kind for _ in range(4000))
    total = sum(MIX.values())
    assert {kind: counts[kind] / 4000 for kind in MIX} == {
        kind: pytest.approx(weight / total, abs=0.03) for kind, weight in MIX.items()
    }
    assert counts["three_digits"] == 0
    only = ArithmeticEnvironment({"addition": 1.0}).evaluation()
    assert only == environment.evaluation()
    held = Counter(task.kind for task in only)
    assert held == {**EVALUATION_TASKS, "tables": 30}
    assert len({asked(task) for task in only}) == len(only)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (" 109", 1.0), ("109.", 1.0), (" 00109", 1.0), ("27 + 82 makes 109 apples", 1.0),
        ("109 or 110", 0.0), ("-109", 0.0), ("1" * 1_000_000, 0.0), ("١٠٩", 0.0), ("", 0.0),
        ("one hundred and nine", 0.0),
    ],
)  # fmt: skip
def test_the_last_whole_number_counts(text: str, reward: float) -> None:
    task = TextTask((Message("user", "What is 27 + 82?"),), "27 + 82 =", "109")
    assert paid(ArithmeticEnvironment(), task, text) == reward


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (b"", "need a file of questions"),
        (b'{"question": "a", "answer": "b"}\n' * 3, "the 3 questions .* all on one side"),
        (DATA + b"nonsense\n", "line 101 is not JSON"),
        (b"[1]\n" + DATA, "line 1 is no JSON object"),
        (DATA + b'\n{"question": "a"}', "line 102 has no text under 'answer'"),
        (b'{"question": 3, "answer": "4"}\n' + DATA, "line 1 has no text under 'question'"),
        (b'{"question": "a", "answer": " "}\n' + DATA, "line 1 has no text under 'answer'"),
        (b'{"question": "\\ud800", "answer": "b"}', "line 1 has half a character"),
        (b'{"question": "\xff", "answer": "b"}', "line 1 is not JSON"),
        (b"[" * 60_000, "line 1 is not JSON"),
        (b"x" * 70_000, "line 1 has 70,000 bytes, at most 65,536"),
        (b"x\n" * 9, "line 5 is not JSON, and 4 more"),
    ],
)
def test_a_bad_file_of_questions_is_refused_by_its_lines(lines: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ExactEnvironment(lines)


@pytest.mark.parametrize(
    ("text", "exact", "verified"),
    [
        ("1/2", 1.0, 1.0), ("so it is \\boxed{1/2}", 1.0, 1.0), ("first\n 1/2 ", 1.0, 1.0),
        ("\\boxed{\\frac{1}{2}}", 0.0, 1.0), ("0.5", 0.0, 1.0), ("\\boxed{2/1}", 0.0, 0.0),
        ("\\boxed{", 0.0, 0.0),
    ],
)  # fmt: skip
def test_who_judges_formulas(text: str, exact: float, verified: float) -> None:
    task = TextTask((Message("user", "What is half of 1?"),), "", "1/2")
    assert paid(ExactEnvironment(DATA), task, text) == exact
    assert paid(MathEnvironment(DATA), task, text) == verified


def test_packages_are_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version", lambda name: "0.8.0")
    with pytest.raises(
        ConfigError, match=r"'math' needs math-verify 0\.9\.0, installed is 0\.8\.0: pip"
    ):
        MathEnvironment(DATA)

    def missing(name: str) -> str:
        raise installed.PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", missing)
    with pytest.raises(ConfigError, match=r"installed is none: pip install 'shoal\[gym\]'"):
        GymEnvironment()


@needs_gym
@pytest.mark.filterwarnings("ignore")
def test_the_gyms_tasks_are_held_out_and_paid() -> None:
    environment, rng = GymEnvironment({"chain_sum": 2.0, "gcd": 1.0}), Random(3)
    for _ in range(20):
        seed = rng.randbytes(32)
        task = environment.task(seed)
        assert task == GymEnvironment({"chain_sum": 2.0, "gcd": 1.0}).task(seed)
        assert paid(environment, task, f"I think <answer>{task.answer}</answer>") == 1.0
        assert paid(environment, task, task.answer) == 1.0
        assert paid(environment, task, task.answer, ended=False) == 0.0
        assert paid(environment, task, "") < 0.1
    held = environment.evaluation()
    assert Counter(task.kind for task in held) == {"chain_sum": 32, "gcd": 32}
    for family in ("composite", "no_such_family"):
        with pytest.raises(ConfigError, match=f"no family '{family}'"):
            GymEnvironment({family: 1.0})


CODE = """
import warnings; warnings.simplefilter("ignore")
from roles.envs.base import make_environment
for name, options in CASES:
    environment = make_environment(name, **options)
    print([environment.task(bytes([n]) * 32) for n in range(8)], environment.evaluation()[:40])
"""


def test_tasks_are_the_same_in_every_process() -> None:
    cases: list[tuple[str, dict[str, object]]] = [("sort", {}), ("arithmetic", {})]
    cases.append(("math-exact", {"data": DATA}))
    if not needs_gym.args[0]:
        cases.append(("reasoning-gym", {"kinds": {"chain_sum": 1.0, "basic_arithmetic": 1.0}}))
    said = {
        subprocess.run(
            [sys.executable, "-c", CODE.replace("CASES", repr(cases))],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    assert len(said.pop()) > 1000


def test_runs_that_were_signed_before_still_find_their_environments() -> None:
    """A run file pins these digests of sources: an edited docstring ends every such run."""
    digests = {
        "sort": "a8307497", "arithmetic": "f07fde54", "math": "1c1bcd89", "guess": "0896dac5",
        "calculator": "64dda790", "reasoning-gym": "6370d9a5",
    }  # fmt: skip
    assert {name: environment_digest(name).hex()[:8] for name in digests} == digests


# The network that sorts


SORT = SortEnvironment()


def test_reward_is_right_or_wrong() -> None:
    task = Task(encode("s312="), encode("123$"))
    assert SORT.reward(task, encode("123$")) == 1.0
    for wrong in ("123", "132$", "123$$", "", "12$"):
        assert SORT.reward(task, encode(wrong)) == 0.0
    assert SORT.reward(task, [-1, 10**30]) == 0.0


@pytest.mark.parametrize("prompt", ["", "s=", "x12=", "s12", "s1a="])
def test_no_solution_to_what_is_no_prompt(prompt: str) -> None:
    with pytest.raises(ValueError, match="not a prompt"):
        SORT.solution(encode(prompt))


def test_environments_are_light() -> None:
    code = "import roles.envs.sort, roles.engines.client, sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"False\n"
