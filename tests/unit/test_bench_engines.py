"""``bench engines`` on a small random model, torch with torch: it stops, goes on, judges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from random import Random

from bench import engines
from bench.engine_work import Share, Way
from bench.falsified import FALSIFIED, Recorded
from roles.engines.base import Completion, Group
from tests.model_folders import END, make_folder


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the bench sets it
    folder = tmp_path / "model"
    make_folder(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return folder


def test_what_was_measured_stays_and_the_rest_is_done_later(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, out = tmp_path / "store", tmp_path / "report.json"
    asked = [
        "--writer", "torch", "--model", str(model), "--store", str(store),
        "--new-tokens", "8", "--groups", "5", "--cheats", "1", "--falsified", "1",
        "--json", str(out),
    ]  # fmt: skip
    assert engines.run([*asked, "--seconds", "0"]) == engines.UNFINISHED
    assert not list(store.rglob("*.000"))
    assert engines.run(asked) == 0
    pieces = {path: path.stat().st_mtime_ns for path in store.rglob("*.00?")}
    assert sum(path.name.startswith("honest") for path in pieces) == 2 * 2
    rows = json.loads(out.read_text())["rows"]
    rejected = {
        row["case"]: row["median"]
        for row in rows
        if (row["metric"], row["subject"]) == ("rejected", "of a group")
    }
    assert rejected["honest"] == 0
    found = {name for name, share in rejected.items() if share == 1}
    sure = {"other seed", "another prompt", "int4 weights", "greedy", *FALSIFIED}
    # rounded to int4 so small a model still draws nearly the same tokens
    assert found >= sure - {"another model's tokens"}
    capsys.readouterr()
    assert engines.run(asked) == 0
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*.00?")} == pieces
    assert "honest: 5 groups, " in capsys.readouterr().out
    assert engines.run([*asked, "--fitted"]) == 0
    assert "honest: 2 groups, " in capsys.readouterr().out


def test_addition_is_asked_of_a_trained_policy_only(model: Path) -> None:
    with pytest.raises(SystemExit, match="needs the --policies"):
        engines.run(["--model", str(model), "--tasks", "addition"])


def test_shares_of_the_work_are_the_whole_and_each_has_something_of_each_way() -> None:
    ways = [Way(name="honest", groups=12, batch=2), Way(name="greedy", groups=4, batch=2)]
    shares = [list(Share.parse(f"{mine}/3").take(ways)) for mine in range(3)]
    jobs = [(way.name, piece) for share in shares for way, piece in share]
    assert len(jobs) == len(set(jobs)) == 6 + 2
    assert list(Share().take(ways))[:3] == [(ways[0], 0), (ways[1], 0), (ways[0], 1)]
    with pytest.raises(ValueError, match="3/3 is no share"):
        Share.parse("3/3")


def test_another_share_judges_nothing_and_waits_for_no_other(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is falsified was written by the first share, which has not begun."""
    asked = [
        "--writer", "torch", "--model", str(model), "--store", str(tmp_path / "store"),
        "--new-tokens", "8", "--groups", "2", "--cheats", "2", "--batch", "2",
    ]  # fmt: skip
    assert engines.run([*asked, "--share", "1/2"]) == engines.UNFINISHED
    assert not capsys.readouterr().out
    assert engines.run([*asked, "--share", "0/2"]) in (0, engines.UNFINISHED)
    assert engines.run(asked) == 0
    assert "replay: 2 groups, " in capsys.readouterr().out


@pytest.mark.parametrize("name", FALSIFIED)
def test_what_is_falsified_still_has_a_shape(name: str) -> None:
    """Else it would be refused without a model, and nothing would be measured."""

    def written(first: int) -> list[Group]:
        lengths = range(first, first + 3)
        answers = [Completion(tuple(range(n)), (0.0,) * n, bytes([n])) for n in lengths]
        return [Group(number, (*answers[number:], *answers[:number])) for number in range(2)]

    honest, foreign = written(9), written(10)
    made = FALSIFIED[name](Recorded(honest, foreign, (99,), 90, 62, Random(0)))
    assert [one.group for one in made] == [0, 1]
    assert made != honest
    for one in made:
        assert len(one.completions) == 3
        for answer in one.completions:
            assert answer.tokens
            assert len(answer.tokens) == len(answer.logprobs)
            assert 99 not in answer.tokens[:-1]
