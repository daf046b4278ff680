"""Where a file may be named, ``-`` is standard output, and no command makes a file of that
name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2p.errors import ConfigError
from p2p.node.usage import STANDARD_OUTPUT, check_target
from sim.cli import main

FEW = ["churn", "--nodes", "4", "--duration", "5"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["run", *FEW, "--json", "-"], "trace_hash"),
        (["run", *FEW, "--save-plan", "-"], "faults"),
        (["trace", *FEW, "--json", "-", "--out", "t.json"], "trace_hash"),
        (["trace", *FEW, "--out", "-"], "traceEvents"),
        (["sweep", *FEW, "--seeds", "1", "--jobs", "1", "--json", "-"], "trace_hash"),
        (["diff", *FEW, "--json", "-"], "same"),
    ],
    ids=lambda value: "-".join(value[:1] + value[5:]) if isinstance(value, list) else None,
)
def test_standard_output_holds_the_json_alone(
    arguments: list[str], key: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(arguments)
    said = capsys.readouterr()
    assert key in json.loads(said.out)
    assert said.err  # what is for people
    assert not (elsewhere / "-").exists()


def test_standard_output_takes_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *FEW, "--json", "-", "--report", "-"]) == 2
    assert "--json and --report cannot both be -" in capsys.readouterr().err


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="name a file"):
        check_target("--key", STANDARD_OUTPUT, text=False)
