"""Folders of models that a stranger made: each costs one sentence, and no process."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from p2p.errors import BadMessage
from p2p.sandbox.launch import find_containment
from roles.calibrate import command
from roles.calibrate.command import main as calibrate
from roles.contract import sign_run
from roles.contract.core.file import EnvironmentPin, Model
from roles.envs.base import environment_digest
from roles.models import trial
from roles.models.__main__ import main
from roles.models.bundle import pin_folder, read_config
from roles.models.errors import BadModel
from roles.models.safetensors import PREFIX_BYTES, RawTensor, decode_untrusted
from tests.model_folders import LLAMA, make_folder, random_weights, write_weights
from tests.support.runs import OWNER, TERMS

Change = Callable[[Path], object]


def with_normalizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    table = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////fwAA"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | table))


def with_tensor(name: str, dtype: str, number: bytes) -> Change:
    def change(folder: Path) -> None:
        weights = random_weights(LLAMA)
        size = weights[name].shape if name in weights else (1,)
        data = number * int(np.prod(size))
        write_weights(folder, {**weights, name: RawTensor(dtype, size, data)})

    return change


FOLDERS: dict[str, tuple[Change, str]] = {
    # memory is asked for that there is not: Rust ends the process
    "abort": (with_normalizer, "ends the process that reads it"),
    "surrogate": (
        lambda one: (one / "tokenizer_config.json").write_text(r'{"eos_token": "\ud800"}'),
        "cannot look up eos_token",
    ),
    "pipe": (lambda one: os.mkfifo(one / "special_tokens_map.json"), "is no regular file"),
    "endless": (
        lambda one: (one / "generation_config.json").symlink_to("/dev/zero"),
        "is no regular file",
    ),
    "control": (with_tensor("\x1b[2J", "BF16", b"\0\0"), "is no tensor of the model"),
    "head": (with_tensor("a.lm_head.weight", "BF16", b"\0\0"), "is no tensor of the model"),
    "double": (with_tensor("model.norm.weight", "F64", bytes(8)), "is F64 of shape"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_hostile_folder_costs_one_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They ended the process, were read for ever, or passed and were refused by engines."""
    change, said = FOLDERS[name]
    folder = make_folder(tmp_path / "model")
    change(folder)
    assert main(["inspect", str(folder)]) == 1
    error = capsys.readouterr().err
    assert re.match(r"error: .*" + said, error)
    assert error.count("\n") == 1
    assert error[:-1].isprintable()


SPY = """
from pathlib import Path
from roles.models.errors import BadModel

class Tokenizer:
    @staticmethod
    def open(folder):
        raise BadModel(" ".join(Path(path).read_text() for path in {paths!r}))
"""


def test_a_tokenizer_is_tried_where_it_reaches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bug of the library in Rust would have been its reader's."""
    if not find_containment("/nowhere").holds:
        pytest.skip("nothing contains a process here")
    folder, cache, secret = tmp_path / "model", tmp_path / "cache", tmp_path / "secret"
    folder.mkdir()
    cache.write_text("of a cache")
    (folder / "tokenizer.json").symlink_to(cache)
    secret.write_text("stolen")
    spies = tmp_path / "spies" / "spies_of_models"
    spies.mkdir(parents=True)
    (spies / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(spies.parent), *sys.path]))
    for paths, said in (
        ([folder / "tokenizer.json"], "of a cache"),
        ([folder / "tokenizer.json", secret], "secret cannot be read in a sandbox: No such"),
    ):
        source = SPY.format(paths=[str(path) for path in paths])
        (spies / "__main__.py").write_text(
            "import sys, types\n"
            "module = types.ModuleType('roles.models.tokenizer')\n"
            f"exec({source!r}, module.__dict__)\n"
            "sys.modules['roles.models.tokenizer'] = module\n"
            "from roles.models.trial import main\n"
            "sys.exit(main())\n"
        )
        monkeypatch.setattr(trial, "MODULE", "spies_of_models")
        with pytest.raises(BadModel, match=said):
            trial.try_tokenizer(folder, ())


def test_names_of_tensors_are_quoted_in_part() -> None:
    """A name of 16 MB was the message."""
    entry = {"dtype": "F8", "shape": [1], "data_offsets": [0, 1]}
    head = json.dumps({"x" * 100_000: entry}).encode()
    with pytest.raises(BadMessage) as refused:
        decode_untrusted(len(head).to_bytes(PREFIX_BYTES, "little") + head + b"\0")
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("out", [".", "/", "", ".."])
def test_a_folder_without_a_name_cannot_be_made(
    out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", "smollm2", "--out", out]) == 2
    assert "names no folder that could be made" in capsys.readouterr().err


def calibrating(folder: Path) -> list[str]:
    """Options for a run whose base is this folder."""
    config = read_config(folder)
    model = Model(
        shape=config.shape, base=pin_folder(folder), end_tokens=(1,), context=config.context
    )
    pin = EnvironmentPin(name="arithmetic", digest=environment_digest("arithmetic"))
    sampling = replace(TERMS.sampling, group_size=2, max_new_tokens=4)
    terms = replace(TERMS, model=model, environments=(pin,), sampling=sampling)
    path = folder.with_name("run.shoal")
    path.write_bytes(sign_run(terms, OWNER).document)
    return ["--run", str(path), "--model", str(folder), "--sequences", "64"]


def test_calibration_tries_the_tokenizer_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "model")
    FOLDERS["abort"][0](folder)
    assert calibrate(calibrating(folder)) == 1
    assert "ends the process that reads it" in capsys.readouterr().err


def test_calibration_waits_for_no_template_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "TASK_SECONDS", 0.2)
    monkeypatch.setattr(trial, "SECONDS", 2)
    folder = make_folder(tmp_path / "model")
    loop = "{% for i in range(9999) %}{% set x = range(90000)|list|sort %}{% endfor %}"
    for source, said in (
        (f"{{% if messages|length == 1 %}}{loop}{{% endif %}}", "32 tasks are not made within"),
        (loop, "or the chat template does"),  # already when it is tried
    ):
        (folder / "chat_template.jinja").write_text(source)
        assert calibrate(calibrating(folder)) == 1
        assert said in capsys.readouterr().err
