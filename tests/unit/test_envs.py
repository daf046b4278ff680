"""The sort environment: determinism, the held-out rule, rewards; and how environments are
found."""

import sys
from pathlib import Path

import pytest

from p2p.errors import ConfigError
from roles.envs.base import ENTRY_POINTS, Task, make_environment
from roles.envs.sort import SortEnvironment, decode, encode
from tests.support.packages import install

SORT = SortEnvironment()


def test_a_known_task_stays_what_it_is() -> None:
    # Validators recompute tasks from seeds: a change here is a new version of the environment.
    assert decode(SORT.task(bytes(32)).prompt) == "s5815296="
    assert decode(SORT.evaluation()[0].prompt) == "s56902085="


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


def test_a_slip_in_a_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shoal envs check` of a file with a syntax error was a traceback."""
    install(tmp_path, "slip", "slip = slip:Slip", group=ENTRY_POINTS)
    (tmp_path / "slip.py").write_text("def task(:\n")
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
