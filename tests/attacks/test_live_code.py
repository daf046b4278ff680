"""A run whose tokenizer has a token that is a Python expression, and whose model draws it.

In a live swarm of four the expression ran in the environment's process of the trainer and of
the validator within seconds, and read the key of both. Here the run is signed as its owner
would, and what both roles call opens it in a real process: see `open_environment_of`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from p2p.errors import ConfigError
from p2p.machine import RealWorld, load_or_create_key, open_world
from roles.contract import Run
from roles.contract.core.file import EnvironmentPin, sign_run
from roles.contract.core.pin import FilePin
from roles.engines.config import MachineLimits
from roles.envs.base import environment_digest
from roles.envs.client import open_environment_of, setup_of
from roles.envs.contained import Payment
from roles.envs.mix import open_mix
from tests.model_folders import END, LLAMA, make_folder
from tests.support.packages import install_module
from tests.support.runs import OWNER, TERMS

needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
QUESTIONS = b"".join(
    json.dumps({"question": f"What is {number}?", "answer": str(number)}).encode() + b"\n"
    for number in range(100)
)
FORMS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>")
"""Where environments look for an answer."""


def make_node(folder: Path) -> tuple[int, ...]:
    """A node's data, with its key and the base of the run; the tokens of the expression."""
    folder.mkdir()
    load_or_create_key(folder / "key")
    base = make_folder(folder / "base")
    key, stolen = str(folder / "key"), str(folder / "stolen")
    path = "__import__('pathlib').Path"
    steal = f"{path}({stolen!r}).write_bytes({path}({key!r}).read_bytes())"
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first = len(vocabulary)
    for form in FORMS:
        vocabulary[form.format(steal)] = len(vocabulary)
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tuple(range(first, first + len(FORMS)))


def run_of(folder: Path, environment: EnvironmentPin) -> Run:
    pins = tuple(pin_file(path) for path in sorted((folder / "base").iterdir()))
    model = replace(TERMS.model, base=pins, context=4096, end_tokens=(END,), shape=LLAMA)
    sampling = replace(TERMS.sampling, max_new_tokens=8)
    terms = replace(TERMS, environments=(environment,), model=model, sampling=sampling)
    return sign_run(terms, OWNER)


def pin_file(path: Path) -> FilePin:
    data = path.read_bytes()
    return FilePin(name=path.name, size=len(data), digest=hashlib.sha256(data).digest())


def pin(name: str, **options: object) -> EnvironmentPin:
    return EnvironmentPin(name=name, digest=environment_digest(name), **options)  # type: ignore[arg-type]


async def pay_all(
    world: RealWorld, run: Run, tokens: tuple[int, ...], data: Path
) -> list[float]:
    """What the expressions earn in the process of a role that joined the run."""
    async with open_environment_of(
        world, run, MachineLimits(environment_data=str(data)), "base"
    ) as environment:
        (task,) = await environment.tasks([bytes(32)])
        return await environment.rewards([(task, [(token, END) for token in tokens])])


def test_the_expression_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that evaluates, in no process of its own, gives the key away: else what
    follows would show nothing."""
    source = (
        "from roles.envs.text import Message, TextTask\n"
        "class Trusting:\n"
        "    name = 'trusting'\n"
        "    def task(self, seed, *, held_out=False):\n"
        "        return TextTask((Message('user', '1 + 1?'),), '', '2')\n"
        "    async def reward(self, task, text, ended):\n"
        "        return float(eval(text) == 2)\n"
        "    def evaluation(self):\n"
        "        return [self.task(b'')]\n"
    )
    install_module(
        tmp_path, "trusting_env", source, "shoal.envs", trusting="trusting_env:Trusting"
    )
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "node"
    tokens = make_node(folder)
    run = run_of(folder, pin("trusting"))
    mix = open_mix(setup_of(run, MachineLimits(), str(folder / "base")))
    payment = Payment()
    payment.pay(mix, mix.task(bytes(32)), (tokens[0], END))
    assert (folder / "stolen").read_bytes() == (folder / "key").read_bytes()


@pytest.mark.parametrize("name", ["arithmetic", "math", "math-exact", "reasoning-gym"])
async def test_no_environment_that_comes_with_shoal_runs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "reasoning-gym" and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning-gym is not installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    folder = tmp_path / "node"
    tokens = make_node(folder)
    options: dict[str, object] = {}
    if name.startswith("math"):
        (tmp_path / "questions.jsonl").write_bytes(QUESTIONS)
        options["data"] = pin_file(tmp_path / "questions.jsonl")
    if name == "reasoning-gym":
        options["kinds"] = {"prime_factorization": 1.0, "number_sorting": 1.0, "jugs": 1.0}
    run = run_of(folder, pin(name, **options))
    async with open_world(folder) as world:
        assert await pay_all(world, run, tokens, tmp_path) == [0.0] * len(FORMS)
    assert not (folder / "stolen").exists()


@needs_gym
@pytest.mark.parametrize("family", ["countdown", "spiral_matrix"])
async def test_a_run_of_a_family_that_evaluates_is_refused_by_nodes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner need not have used `shoal run create`, which refuses it as well."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    folder = tmp_path / "node"
    tokens = make_node(folder)
    run = run_of(folder, pin("reasoning-gym", kinds={family: 1.0}))
    async with open_world(folder) as world:
        with pytest.raises(ConfigError, match=f"the family '{family}' .* runs answers as code"):
            await pay_all(world, run, tokens, tmp_path)
    assert not (folder / "stolen").exists()
