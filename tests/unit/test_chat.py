"""Talking to a model and measuring it: which model a folder is about, answers, intervals."""

from __future__ import annotations

import io
import json
import math
from itertools import combinations
from pathlib import Path

import pytest

from p2p.errors import ConfigError
from roles.chat import chat, evaluate, sample
from roles.chat.evaluate import pass_at
from roles.chat.find import find_models
from roles.contract import sign_run
from roles.engines.torch.learner import TorchLearner
from roles.models.bundle import read_config
from roles.own.__main__ import main as run_main
from tests.model_folders import make_folder
from tests.support.runs import OWNER, TERMS
from tests.support.toys import sorting_engine, sorting_learner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    weights = place / "trainer" / "trainer" / "weights"
    weights.mkdir(parents=True)
    (place / "trainer" / "run.shoal").write_bytes(sign_run(TERMS, OWNER).document)
    learner = TorchLearner(sorting_engine(learner=sorting_learner()))
    learner.open(place / "none")
    for step in (0, 7):
        learner.save(None, weights / f"{step:08d}.safetensors")
    return place


def test_of_a_run_the_newest_policy_is_found_and_any_other_by_its_number(run: Path) -> None:
    models = find_models(run)
    assert models.newest.label == f"policy 7 of {TERMS.name}"
    assert models.first is not None
    assert models.first.path.name == "00000000.safetensors"
    assert find_models(run / "trainer").newest == models.newest
    assert find_models(run, 0).newest.label == f"policy 0 of {TERMS.name}"
    assert find_models(run, 0).first is None
    with pytest.raises(ConfigError, match="has no policy 3; it has 0, 7"):
        find_models(run, 3)


def test_what_a_node_pulled_or_pre_trained_is_found_once_it_is_whole(tmp_path: Path) -> None:
    store = tmp_path / "store" / "0123"
    for version in (4, 5):
        name = f"v{version:016d}-00c0ffee"
        (store / f"{name}.files").mkdir(parents=True)
        (store / f"{name}.policy").write_bytes(b"")
    (store / f"v{5:016d}-00c0ffee.part").write_bytes(b"")
    assert find_models(tmp_path).newest.label == f"policy 4 of {tmp_path.name}"
    export = tmp_path / "run" / "trainer-1" / "diloco" / "export"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    assert find_models(tmp_path / "run").newest.path == export


@pytest.mark.parametrize("name", ["", "none"])
def test_a_folder_without_a_model_says_what_has_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat([str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "folder" in said


def test_a_model_answers_line_by_line_and_forgets(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "hello\n/before\n/reset\nhello\n\n/what\n/exit\nunread\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert chat([str(folder), "--tokens", "8", "--temperature", "0"]) == 0
    said = capsys.readouterr().out
    assert "has no model from before the training" in said
    assert "forget the conversation" in said
    first, second = said.split(f"{folder} has no model from before the training\n")
    assert second.startswith(first)


def test_samples_repeat_and_differ_by_seed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(folder), "--prompt", "hello", "--tokens", "8", "--count", "3", "--json"]
    answers = []
    for _ in range(2):
        assert sample(argv) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        answers.append([row["answer"] for row in rows])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


def test_a_network_without_words_is_measured_and_not_talked_to(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat([str(run)]) == 2
    assert "shoal eval" in capsys.readouterr().err
    assert evaluate([str(run), "--tasks", "6", "--k", "2", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["model"] for row in rows] == [f"policy {n} of {TERMS.name}" for n in (0, 7)]
    for row in rows:
        assert row["tasks"] == 6
        assert 0 <= row["passed"]["mean"] <= row["passed_k"]["mean"] <= 1
    assert evaluate([str(run), "--env", "chess"]) == 2
    assert "no environment 'chess'" in capsys.readouterr().err


def test_an_export_of_a_network_has_its_configuration_and_a_card(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "export"
    assert run_main(["export", str(run), "-o", str(target)]) == 0
    assert read_config(target).shape == TERMS.model.shape
    assert "no tokenizer" in capsys.readouterr().err
    assert f"# policy 7 of {TERMS.name}" in (target / "README.md").read_text()
    assert find_models(target).newest.path == target
    assert run_main(["export", str(run), "-o", str(target)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_pass_at_k_is_the_share_of_choices_with_a_right_answer() -> None:
    for right in range(6):
        answers = [True] * right + [False] * (5 - right)
        for k in range(1, 6):
            choices = list(combinations(answers, k))
            assert math.isclose(pass_at(5, right, k), sum(map(any, choices)) / len(choices))
