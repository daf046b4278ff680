"""Text may come from a hostile model: what it can make of the scorers that come with Shoal.

What is hostile is paid in a process of its own, with a hook that sees what Python is about to
do: the payloads below run commands and write files, if anything evaluates them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2p.errors import ConfigError
from roles.envs.gym import EVALUATING, GUESSED, NEEDS_SETTINGS, GymEnvironment

needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)

MARK = "PWNED"
CODE = (
    f"__import__('os').system('echo {MARK}')",
    f"open('{MARK}', 'w')",
    f"[open('{MARK}', 'w')]",
    f"1 if open('{MARK}', 'w') else 2",
    f"f\"{{open('{MARK}', 'w')}}\"",
    f"f\"{{__import__('os').system('echo {MARK}')}}\"",
    f"(lambda: open('{MARK}', 'w'))()",
    f"().__class__.__base__.__subclasses__()[0].__init__.__globals__['{MARK}']",
    f"getattr(__import__('builtins'), 'op' + 'en')('{MARK}', 'w')",
    f"Symbol('x', **{{}}) + open('{MARK}', 'w')",
    f"sympify(\"open('{MARK}', 'w')\")",
    f"x + open('{MARK}', 'w').close()",
    f"Lambda(x, x)(open('{MARK}', 'w'))",
    f"[c for c in ().__class__.__base__.__subclasses__() if open('{MARK}', 'w')]",
    f"(x := open('{MARK}', 'w'))",
    f'exec(\'open("{MARK}", "w")\')',
    f"__import__('subprocess').Popen(['echo', '{MARK}'])",
    f"!!python/object/apply:os.system ['echo {MARK}']",
    f"cos\nsystem\n(S'echo {MARK}'\ntR.",
    f"{{\"{MARK}\": \"__import__('os').system('echo {MARK}')\"}}",
    f"[\"__import__('os').system('echo {MARK}')\"]",
    f"{{{{ cycler.__init__.__globals__.os.popen('echo {MARK}').read() }}}}",
    f"%(open('{MARK}', 'w'))s",
    f"$(echo {MARK})",
)
BOMBS = (
    "1e999999999", "1e-999999999", "1/1e99999", "1_0e9_9_9_9_9_9_9_9_9", "9" * 4000,
    "9" * 16000, "9**9**9**9", "[" * 900, "[" * 16000, "[" * 8000 + "]" * 8000,
    '{"a":' * 2500 + "1" + "}" * 2500, "(" * 900 + "A" + ")" * 900,
    "(" * 8000 + "A" + ")" * 8000, "¬" * 16000 + "A", " ∧ ".join("abcdefghijklmnopqrstuvwxyz"),
    " ∧ ".join(f"A{number}" for number in range(60)), "A→" * 8000 + "A", "R9999999 U9999999",
    "R9 " * 660, "R9 " * 5000, "A+99999999 B-99999999 " * 9, "A+9" * 5000, "nan", "inf", "-inf",
    "nan, nan", "9×" * 8000 + "9", "9" * 4000 + "×" + "9" * 4000, "a," * 8000, "\n" * 16000,
    "A=1," * 4000 + "B=2", "move disk 1 from peg 1 to peg 2\n" * 500, "9" * 400 + ":00",
    "9" * 400 + " days, 1:1", "٩٩٩", "½", "0x" + "f" * 16000, "ABC" * 5000, "1 " * 8000,
    "WASD" * 4000, "\x00" * 100, "\U0010ffff" * 8000, "[[" + "1," * 8000 + "1]]",
    '["w,A1,B2",' * 1000 + "0]", "[null]", "{}", "[{}]", '"x"', "true", "",
)  # fmt: skip
MOST_CPU = 1.0
"""Seconds of CPU for one answer, however busy the machine is; the process ends beyond."""

CHILD = """
import json, os, signal, sys, warnings
warnings.simplefilter("ignore")
import trio
from reasoning_gym.factory import DATASETS
from roles.envs import gym
from roles.envs.contained import AnswerFailed, reward_of
asked = json.load(sys.stdin)
answers, limit, mark = asked["answers"], asked["limit"], asked["mark"]
ran, failed, said = set(), {}, ""

def watch(event, arguments):
    if event in ("os.system", "open", "subprocess.Popen") and mark in repr(arguments):
        ran.add(said)
        raise PermissionError(said)

class Plain:  # a text environment without its tokenizer
    name = "reasoning-gym"
    def reward(self, task, tokens):
        return trio.run(whole.reward, task, tokens, True)

families = asked["families"] or sorted(set(DATASETS) - gym.NEEDS_SETTINGS)
if not asked["guarded"]:
    gym.EVALUATING = gym.GUESSED = frozenset()
sys.addaudithook(watch)
report = {}
for family in families:
    whole = gym.GymEnvironment({family: 1.0})
    task = whole.task(bytes(32))
    ran.clear()
    failed = set()
    for said in answers:
        print(family, repr(said[:40]), file=sys.stderr)
        signal.setitimer(signal.ITIMER_PROF, limit)
        try:
            reward_of(Plain(), task, said)
        except AnswerFailed as error:
            failed.add(str(error))
        signal.setitimer(signal.ITIMER_PROF, 0)
    report[family] = [sorted(ran), sorted(failed)]
print("\\n" + json.dumps(report))  # one of them prints a dot
"""


def pay(
    folder: Path,
    answers: tuple[str, ...],
    *families: str,
    guarded: bool = True,
    limit: float = 60.0,
) -> dict[str, tuple[list[str], list[str]]]:
    """Of each family: which answers ran as code, and what was raised on others."""
    asked = {"families": families, "answers": answers, "guarded": guarded}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=folder, capture_output=True, text=True,
        input=json.dumps({**asked, "limit": limit, "mark": MARK}),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-600:]
    report: dict[str, tuple[list[str], list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return report


@needs_gym
def test_the_families_that_evaluate_are_those_that_are_refused(tmp_path: Path) -> None:
    """Nine ran what the answer said: a token read the keys of two nodes."""
    report = pay(tmp_path, CODE, guarded=False)
    assert len(report) == 105
    assert {family for family, (ran, _) in report.items() if ran} == EVALUATING
    assert not (tmp_path / MARK).exists(), "the hook came first"


@needs_gym
@pytest.mark.parametrize("family", sorted(EVALUATING))
def test_a_family_that_evaluates_is_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match=f"the family '{family}' .* runs answers as code"):
        GymEnvironment({"chain_sum": 1.0, family: 1.0})


@needs_gym
def test_no_answer_costs_a_family_more_than_a_second(tmp_path: Path) -> None:
    """26 variables filled the memory of whoever paid propositional_logic."""
    from reasoning_gym.factory import DATASETS

    sound = sorted(set(DATASETS) - EVALUATING - GUESSED - NEEDS_SETTINGS)
    assert set(pay(tmp_path, BOMBS, *sound, limit=MOST_CPU)) == set(sound)


RAISED = {"prime_factorization": ("what?", "ValueError"), "boxnet": ("[1]", "AttributeError")}


@needs_gym
def test_what_a_scorer_raises_on_is_an_answer_that_failed(tmp_path: Path) -> None:
    """It made the whole submission inconclusive."""
    answers = tuple(answer for answer, _ in RAISED.values())
    report = pay(tmp_path, answers, *RAISED)
    for family, (_, kind) in RAISED.items():
        assert any(kind in said for said in report[family][1]), family
