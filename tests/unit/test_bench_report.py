"""What a bench writes can be read by a machine, and compares pairs, not averages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main, names
from bench.report import Report


def test_a_report_has_the_promised_shape(tmp_path: Path) -> None:
    report = Report("bulk")
    report.add("loopback", "shoal", "throughput", "MB/s", [500.0, 520.0, 100.0])
    report.add("loopback", "other", "throughput", "MB/s", [100.0, 104.0, 50.0])
    assert report.compare("loopback", "throughput", "shoal", "other") == 5.0
    report.write(tmp_path / "out.json")
    table = json.loads((tmp_path / "out.json").read_text())
    assert set(table) == {"bench", "machine", "rows", "ratios"}
    assert set(table["machine"]) == {"cores", "load", "python", "versions"}
    assert table["rows"][0] == {
        "case": "loopback",
        "subject": "shoal",
        "metric": "throughput",
        "unit": "MB/s",
        "values": [500.0, 520.0, 100.0],
        "median": 500.0,
    }
    assert table["ratios"] == [
        {
            "case": "loopback",
            "metric": "throughput",
            "of": "shoal",
            "to": "other",
            "median": 5.0,
        }
    ]
    assert "shoal / other" in str(report)
    report.write(None)


def test_benches_are_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rl-controls" in names()
    assert "report" not in names()
    assert main(["--help"]) == 0
    assert main(["nothing"]) == 2
    assert "rl-controls" in capsys.readouterr().out
