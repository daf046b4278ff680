"""The sort environment: determinism, the held-out rule, rewards; and how environments are
found.
"""

import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from p2p.errors import ConfigError
from roles.envs.base import (
    ENTRY_POINTS,
    Task,
    environment_digest,
    make_environment,
    open_teaching,
)
from roles.envs.sort import SortEnvironment, decode, encode, is_held_out
from tests.support.packages import install

SORT = SortEnvironment()


@given(st.binary(min_size=32, max_size=32), st.booleans())
def test_tasks_follow_from_their_seed(seed: bytes, held_out: bool) -> None:
    task = SORT.task(seed, held_out=held_out)
    assert task == SORT.task(seed, held_out=held_out)
    prompt = decode(task.prompt)
    assert is_held_out(prompt) == held_out
    assert decode(task.answer) == "".join(sorted(prompt[1:-1])) + "$"
    assert task.answer == SORT.solution(task.prompt)
    assert 2 <= len(prompt) - 2 <= 8


def test_a_known_task_stays_what_it_is() -> None:
    # Validators recompute tasks from seeds: a change here is a new version of the environment.
    assert decode(SORT.task(bytes(32)).prompt) == "s5815296="
    assert decode(SORT.evaluation()[0].prompt) == "s56902085="


def test_evaluation_is_fixed_held_out_and_long() -> None:
    tasks = SORT.evaluation()
    assert tasks == SortEnvironment().evaluation()
    assert len(tasks) == 512
    assert all(
        is_held_out(decode(task.prompt)) and 7 <= len(task.prompt) <= 10 for task in tasks
    )


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


def test_environments_are_found() -> None:
    assert open_teaching("sort").name == "sort"
    assert len(environment_digest("sort")) == 32
    for missing in ("nonsense", "roles.envs.sort:SortEnvironment", "roles.envs.nothing:Sort"):
        with pytest.raises(ConfigError):
            open_teaching(missing)


def test_a_slip_in_a_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shoal envs check` of a file with a syntax error was a traceback."""
    install(tmp_path, "slip", "def task(:\n", ENTRY_POINTS, slip="slip:Slip")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'slip' cannot be loaded from slip:Slip: inv"):
        make_environment("slip")


def test_environments_are_light() -> None:
    import subprocess

    code = "import roles.envs.sort, roles.engines.client, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
