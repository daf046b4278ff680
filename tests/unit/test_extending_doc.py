"""The environment in docs/tutorials/thirty-minutes.md is as short as it claims, sound, and a
model learns from it."""

from __future__ import annotations

import os
import re
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from p2p.machine import open_world
from roles.envs.base import Ration, Task, environment_digest
from roles.envs.client import WorkerEnvironment
from roles.envs.mix import EnvironmentPart, EnvironmentSetup
from roles.envs.text import TextModel
from roles.models.tokenizer import Tokenizer
from tests.model_folders import END, LLAMA, make_folder
from tests.support.packages import install

DOCS = Path(__file__).parent.parent.parent / "docs" / "tutorials" / "thirty-minutes.md"
NEW_TOKENS = 3


def example() -> str:
    found = re.search(
        r"<!-- file: alphabet/alphabet.py -->\n```python\n(.*?)```",
        DOCS.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert found is not None
    return found.group(1)


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentSetup:
    """The example as a package, installed as the text says, and a small random model."""
    line = re.search(r"^alphabet = \"(.*)\"$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert line is not None
    install(tmp_path, "your-package", f"alphabet = {line.group(1)}")
    (tmp_path / "alphabet.py").write_text(example())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    model = TextModel(
        folder=str(make_folder(tmp_path / "model")),
        end_tokens=(END,),
        vocabulary=LLAMA.vocabulary,
        context=128,
        max_new_tokens=NEW_TOKENS,
    )
    return EnvironmentSetup(parts=(EnvironmentPart(name="alphabet"),), model=model)


def test_the_example_is_under_forty_lines() -> None:
    assert len(example().splitlines()) < 40
    assert len([line for line in example().splitlines() if line.strip()]) <= 30


async def test_the_example_pays_what_it_says(setup: EnvironmentSetup) -> None:
    assert len(environment_digest("alphabet")) == 32
    async with open_world() as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(
            world, setup, Ration(memory=2 << 30), stack, required=False
        )
        await environment.open()
        seeds = [bytes([number]) * 32 for number in range(64)]
        tasks = await environment.tasks(seeds)
        held = await environment.evaluation()
        assert not {task.prompt for task in tasks} & {task.prompt for task in held}
        assert setup.model is not None
        tokenizer = Tokenizer.open(Path(setup.model.folder))
        letter = tokenizer.encode("z")
        answers: list[tuple[Task, list[tuple[int, ...]]]] = [
            (task, [(), (END,), letter, (*letter, END)]) for task in tasks
        ]
        rewards = await environment.rewards(answers)
        assert set(rewards) <= {0.0, 0.1, 0.5, 1.0}
        assert rewards[:3] == [0.0, 0.0, 0.1]
