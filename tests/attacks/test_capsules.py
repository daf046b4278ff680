"""Capsules: environments of strangers that travel with a run, and what they may try."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from p2p.errors import BadMessage, ConfigError
from p2p.machine import open_world
from p2p.node.cli import _configure, _parse
from roles.contract.core.file import EnvironmentPin, sign_run
from roles.contract.core.pin import MAX_CAPSULE, FilePin
from roles.engines.config import MachineLimits
from roles.envs import base
from roles.envs.base import Ration, TurnLimits, environment_digest
from roles.envs.capsule import (
    MAX_FILES,
    MAX_UNPACKED,
    CapsuleFailed,
    open_capsule,
    pack,
    read_capsule_untrusted,
)
from roles.envs.client import WorkerEnvironment, modules_for, open_environment_of
from roles.envs.data import pin_data
from roles.envs.mix import EnvironmentPart, EnvironmentSetup
from roles.envs.text import TextModel
from roles.envs.wasm import prepare
from roles.models.tokenizer import Tokenizer
from roles.own.envs import main
from tests.counting import memory_at_most
from tests.model_folders import END, make_folder
from tests.support.runs import OWNER, TERMS

SOURCE = """
from roles.envs.answers import spoken
from roles.envs.text import Message, TextTask, is_held_out
import parts.words

class Environment:
    def task(self, seed, *, held_out=False):
        text = parts.words.WORDS[seed[0] % 3] + str(is_held_out("q"))
        return TextTask((Message("user", text),), "", "fish", info="kept")
    async def respond(self, task, said):
        return None if "fish" in said[-1] else task.info
    async def reward(self, task, said, ended):
        text = spoken(said[-1])
        {tries}
        return float(ended and text == task.answer)
    def evaluation(self):
        return [self.task(bytes([n]), held_out=True) for n in range(9)]
"""
WORDS = 'WORDS = __loader__.get_data("words.txt").decode().split()\n'


@pytest.fixture
def python() -> None:
    pytest.importorskip("wasmtime", reason="capsules run as wasm: pip install 'shoal[wasm]'")
    try:
        prepare(("cpython",))
    except ConfigError as error:
        pytest.skip(str(error))


def packed(**files: str | bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def made(tries: str = "pass") -> bytes:
    source = SOURCE.replace("{tries}", tries)
    return packed(**{"environment.py": source, "parts/__init__.py": "",
                     "parts/words.py": WORDS, "words.txt": "one two three"})  # fmt: skip


@pytest.mark.parametrize(
    ("tries", "said"),
    [
        ("while text == 'loop': pass", "exceeds a bound"),
        ("text == 'loop' and self.reward.__func__.__get__(self)(task, said, ended).send(None)",
         "exceeds a bound"),
        ("text == 'loop' and [print(n) for n in iter(int, 1)]", "exceeds a bound"),
        ("import sys; text == 'loop' and sys.__stdout__.write('x' * 10**7)", "exceeds a bound"),
        ("import os; text == 'loop' and os._exit(0)", "nonsense"),
        ("import sys; text == 'loop' and sys.exit(0)", "SystemExit"),
        ("import os; text == 'loop' and os.write(1, b'[[true,1]]')", "nonsense"),
        ("text == 'loop' and open('/etc/passwd')", "environment.py:"),
        ("import _ctypes", "ModuleNotFoundError"),
        ("import socket; socket.create_connection(('localhost', 80))", "Error"),
        ("import subprocess; subprocess.run(['ls'])", "Error"),
        ("import threading; threading.Thread(target=print).start()", "thread"),
        ("text == 'loop' and bytearray(10**9)", "MemoryError"),
        ("return {}", "TypeError"),
    ],
)  # fmt: skip
def test_what_a_capsule_does_costs_its_own_call(python: None, tries: str, said: str) -> None:
    capsule = open_capsule(made(tries))
    task = capsule.task(bytes(32))
    capsule.expect([("reward", task, ("fish",), True), ("reward", task, ("loop",), True)])
    with pytest.raises(CapsuleFailed, match=said):
        trio.run(capsule.reward, task, ("loop",), True)
    if "'loop'" in tries:
        assert trio.run(capsule.reward, task, ("<think>a</think>fish",), True) == 1.0
        assert trio.run(capsule.reward, task, ("fish",), False) == 0.0


def test_it_repeats_whatever_was_asked_before(python: None) -> None:
    """A call in a batch is a call by itself, and the clock and random numbers are constant."""
    tries = "import random, time; return random.random() if text else time.time() % 1"
    one, other = open_capsule(made(tries)), open_capsule(made(tries))
    task = one.task(b"\1" * 32)
    assert task == other.task(b"\1" * 32)
    assert task.messages[0].content == "twoFalse"
    assert [trio.run(one.reward, task, (said,), True) for said in ("a", "")] == [
        trio.run(other.reward, task, (said,), True) for said in ("a", "")
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no zip"),
        (bytes(MAX_CAPSULE + 1), "4,194,305 bytes"),
        (packed(**{"other.py": ""}), "no environment.py"),
        (packed(**{"environment.py": "", "data": bytes(MAX_UNPACKED + 1)}), "files have over"),
        (packed(**{f"f{n}": b"" for n in range(MAX_FILES + 1)}), "more than"),
        *((packed(**{"environment.py": "", name: ""}), "is no name") for name in (
            "../up.py", "/etc/cron.d/x", "a/../../b", "C:\\x", ".hidden", "a//b", "é",
        )),
        (packed(**{"environment.py": "", "fast.so": b"\x7fELF"}), "pure Python"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_no_capsule_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(BadMessage, match=said):
        read_capsule_untrusted(data)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bomb_of_another_method_is_not_unpacked(method: int) -> None:
    """Python unpacks these as a whole, whatever one asks for."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", method) as archive:
        archive.writestr("environment.py", bytes(4 * MAX_UNPACKED))
    refused = pytest.raises(BadMessage, match="neither stored nor deflated")
    with memory_at_most(MAX_UNPACKED), refused:
        read_capsule_untrusted(data.getvalue())


def test_a_bomb_of_nested_entries_is_bounded() -> None:
    """Entries that overlap, and one that says it is small."""
    data = bytearray(packed(**{"environment.py": "", "bomb": bytes(3 * MAX_UNPACKED)}))
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = (9).to_bytes(4, "little")
    with pytest.raises(BadMessage):
        read_capsule_untrusted(bytes(data))


def pin_of_fish() -> EnvironmentPin:
    data = FilePin(name="fish.capsule", size=9, digest=bytes(32))
    digest = environment_digest("capsule.fish")
    return EnvironmentPin(name="capsule.fish", digest=digest, data=data)


def test_a_run_names_it_by_its_digest_and_two_interpreters_never_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pin = pin_of_fish()
    for name, size in (("other.capsule", 9), ("fish.zip", 9), ("fish.capsule", 1 << 30)):
        with pytest.raises(ValueError, match=r"is fish\.capsule, of at most 4,194,304 bytes"):
            replace(pin, data=FilePin(name=name, size=size, digest=bytes(32)))
    with pytest.raises(ValueError, match="a model with a base"):
        replace(TERMS, environments=(pin,))
    digest_of = base.module_digest
    monkeypatch.setattr(  # this machine's wasm is of another version
        base, "module_digest", lambda name: bytes(32) if "wasm" in name else digest_of(name)
    )
    assert environment_digest("capsule.fish") != pin.digest
    assert environment_digest("code") != digest_of("roles.envs.code")


async def test_a_capsule_runs_only_where_the_owner_of_the_machine_agreed(
    tmp_path: Path,
) -> None:
    pin = pin_of_fish()
    names = ("config.json", "tokenizer.json", "model.safetensors")
    files = tuple(FilePin(name=name, size=1, digest=bytes(32)) for name in names)
    model = replace(TERMS.model, base=files, seed=0)
    run = sign_run(replace(TERMS, environments=(pin,), model=model), OWNER)
    assert run.terms.carried == (*files, pin.data)
    async with open_world(tmp_path) as world:
        with pytest.raises(ConfigError, match="--accept-capsules"):
            async with open_environment_of(
                world, run, MachineLimits(), "model", takes_capsules=False
            ):
                pytest.fail("it runs")
    assert not _configure(_parse([])).accept_capsules
    assert _configure(_parse(["--accept-capsules"])).accept_capsules


TURNS = TurnLimits(most=3, heard=40, max_new_tokens=60, end_tokens=(END,))


@asynccontextmanager
async def playing(
    tmp_path: Path, part: EnvironmentPart, turns: TurnLimits | None = TURNS
) -> AsyncIterator[WorkerEnvironment]:
    folder = tmp_path / "model"
    if not folder.exists():
        make_folder(folder)
    model = TextModel(
        folder=str(folder), end_tokens=(END,), vocabulary=320, context=1024, max_new_tokens=100
    )
    setup = EnvironmentSetup(
        parts=(part,), model=model, folder=str(tmp_path), turns=turns,
        modules=modules_for((part,)),
    )  # fmt: skip
    async with open_world(tmp_path / "node") as world, AsyncExitStack() as stack:
        environment = WorkerEnvironment(
            world, setup, Ration(), stack, vocabulary=320, context=1024, required=False
        )
        await environment.open()
        yield environment


async def test_a_capsule_plays_where_processes_are_contained(
    python: None, tmp_path: Path
) -> None:
    make_folder(tmp_path / "model")
    file = tmp_path / "model" / "fish.capsule"  # beside the tokenizer, as policies bring it
    file.write_bytes(made())
    part = EnvironmentPart(name="capsule.fish", data=pin_data(str(file)))
    words = Tokenizer.open(tmp_path / "model").encode
    right, more = (*words("fish"), END), (*words("bird"), END)
    async with playing(tmp_path, part) as environment:
        (task,) = await environment.tasks([bytes(32)])
        one, two, cut = await environment.hear([(task, [right, more + right, more[:-1]])])
        assert (one, len(two), two[1], cut) == (((),), 2, (), ())
        given = [right, more + right, more, ()]
        assert await environment.rewards([(task, given)]) == [1, 1, 0, 0]
        assert len(await environment.evaluation()) == 9
    file.write_bytes(made("return 1.0"))  # somebody changes it
    with pytest.raises(ConfigError, match="not the file that the run pins"):
        async with playing(tmp_path, part):
            pytest.fail("it runs")


async def test_programs_are_paid_where_processes_are_contained(
    python: None, tmp_path: Path
) -> None:
    """The sandbox forbids memfds, which wasmtime likes to use: nothing was ever paid."""
    rows = [
        {"question": f"Write f, {n}.", "solution": f"def f(): return {n}",
         "tests": {"calls": {"function": "f", "cases": [[[], n]]}}}
        for n in range(40)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    part = EnvironmentPart(name="code", data=pin_data(str(tmp_path / "rows.jsonl")))
    async with playing(tmp_path, part, None) as environment:
        (task,) = await environment.tasks([bytes(32)])
        words = Tokenizer.open(tmp_path / "model")
        said = words.decode(task.prompt)
        number = int(said[said.index(", ") + 2 : said.index(".")])
        answers = [(*words.encode(f"```python\ndef f(): return {n}\n```"), END)
                   for n in (number, number + 1)]  # fmt: skip
        assert await environment.rewards([(task, answers)]) == [1.0, 0.0]


def test_a_folder_becomes_a_file_that_is_checked(
    python: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["new", "vowels", "--capsule", "--turns"]) == 0
    assert main(["pack", "vowels"]) == 0
    first = (tmp_path / "vowels.capsule").read_bytes()
    assert pack(tmp_path / "vowels") == first
    assert main(["check", "vowels.capsule", "--tasks", "24"]) == 0
    source = tmp_path / "vowels" / "environment.py"
    source.write_text(source.read_text().replace("1.0 / len(said)", "2.0"))
    assert main(["pack", "vowels"]) == 0
    assert main(["check", "vowels.capsule", "--tasks", "24"]) == 1
    assert "from 0 to 1" in capsys.readouterr().out
    source.write_text("import numpy")
    assert main(["pack", "vowels"]) == 0
    assert main(["check", "vowels.capsule"]) == 2
    assert "ModuleNotFoundError" in capsys.readouterr().err
