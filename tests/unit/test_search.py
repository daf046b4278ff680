"""The search of a corpus between turns: what it finds, and that strangers find the same."""

import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from p2p.errors import ConfigError
from p2p.machine import open_world
from roles.contract.core.pin import FilePin
from roles.envs.base import Ration, TurnLimits, make_environment
from roles.envs.client import WorkerEnvironment
from roles.envs.data import pin_data
from roles.envs.examine import examine
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, open_mix
from roles.envs.text import TextModel
from roles.envs.turns import Heard
from roles.models.tokenizer import Tokenizer
from tests.model_folders import END, make_folder

pytest.importorskip("bm25s", reason="bm25s is not installed")

TOWNS = ("Aalen", "Bern", "Celle", "Dover", "Essen")
LINES = [
    line
    for n in range(60)
    for line in (
        {"title": f"Person {n}", "text": f"was born in {TOWNS[n % 5]} in {1700 + n}."},
        {"question": f"When was person {n} born?", "answer": str(1700 + n)},
    )
]


@pytest.fixture
def pin(tmp_path: Path) -> FilePin:
    path = tmp_path / "people.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return pin_data(str(path))


async def test_passages_are_found_between_turns() -> None:
    search = make_environment("search", data="\n".join(map(json.dumps, LINES)).encode())
    task = search.task(b"t" * 32)
    number = int(task.answer) - 1700
    found = await search.respond(task, [f"Let me see\n> search: Person {number}?"])
    born = f"was born in {TOWNS[number % 5]} in {task.answer}."
    assert found.split("\n")[0] == f"[{number + 1}] Person {number} {born}"
    ties = "\n".join(
        f"[{n + 1}] Person {n} was born in {TOWNS[n]} in {1700 + n}." for n in range(3)
    )
    assert await search.respond(task, ["search: born"]) == ties, "in the order of the file"
    for nothing in ("search: zebra", "search: " + " " * 100_000, "SEARCH: \x00?!"):
        assert await search.respond(task, [nothing]) == "nothing found"
    final = f"So \\boxed{{{task.answer}}}"
    assert await search.respond(task, ["search: x", final]) is None
    assert await search.reward(task, ["search: x", final], True) == 1
    assert await search.reward(task, [f"{final}\nsearch: x"], True) == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"", "a file with passages"), (b'{"text": "?"}', "a file with passages"),
     (b'{"text": "a"}\n{"what": 1}', "line 1 has no text under 'question'"),
     (b'{"text": "a"}\n{"text": "\\ud800"}', "line 1 has no text under 'question'"),
     (b'{"text": "a"}\n{"text": ["b"]}', "line 1 has no text under 'question'"),
     (b'{"text": "a"}\n{"question": "b", "answer": "c"}', "all on one side")],
)  # fmt: skip
def test_a_bad_file_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_environment("search", data=data)


def test_a_stranger_hears_the_same(pin: FilePin, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "llama")
    model = TextModel(
        folder=str(folder), end_tokens=(END,), vocabulary=320, context=2048, max_new_tokens=900
    )
    setup = EnvironmentSetup(
        parts=(EnvironmentPart(name="search", data=pin),), model=model, folder=str(tmp_path),
        turns=TurnLimits(most=4, heard=200, max_new_tokens=400, end_tokens=(END,)),
    )  # fmt: skip
    write, here = Tokenizer.open(folder).encode, open_mix(setup)
    turns = ["search: Dover 1703", "search: born in Essen or Bern", "\\boxed{1703}"]
    said = tuple(token for turn in turns for token in (*write(turn), END))
    tasks = [here.task(bytes([n]) * 32) for n in range(4)]
    answers = [(task, [said, said[:30]]) for task in tasks]

    async def elsewhere() -> tuple[list[Heard], list[float]]:
        async with open_world(tmp_path) as world, AsyncExitStack() as stack:
            there = WorkerEnvironment(world, setup, Ration(), stack, required=False)
            await there.open()
            return await there.hear(answers), await there.rewards(answers)

    heard, paid = trio.run(elsewhere)
    assert heard == [here.hear(task, one) for task, given in answers for one in given]
    assert paid == [here.reward(task, one) for task, given in answers for one in given]
    assert [len(one) for one in heard] == [3, 1] * 4
    assert 100 < sum(len(words or ()) for words in heard[0]) <= 200, "cut to what is left"


@pytest.mark.deep
def test_it_is_sound(pin: FilePin, tmp_path: Path) -> None:
    assert examine("search", tmp_path / pin.name) == []
