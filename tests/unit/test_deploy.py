"""What runs nodes for people: a systemd unit, containers."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from p2p.node.commands import load_command
from p2p.node.usage import CommandParser
from tests.support.runs import TRAINER

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


def commands_in(folder: Path) -> Iterator[list[str]]:
    """Every command line of ours in what is deployed, without ``shoal``."""
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    assert set(services) == {"init", "trainer", "validator", "inference"}
    for service in services.values():
        words = service["command"]
        if service.get("entrypoint") == ["sh", "-c"]:
            line = re.sub(r"\$\$\(shoal key [^)]*\)", str(TRAINER.peer_id), words[0])
            words = shlex.split(line[line.index("exec shoal ") :])[2:]
        yield words
    (line,) = re.findall(r"^ExecStart=\S+/shoal (.*)", unit(), re.MULTILINE)
    yield shlex.split(line.replace("%i", "inference"))
    (line,) = re.findall(r"^CMD (\[.*\])", (folder / "Containerfile").read_text(), re.MULTILINE)
    yield shlex.split(line.strip("[]").replace(",", " "))


def unit() -> str:
    return (DEPLOY / "shoal@.service").read_text()


def test_every_command_line_that_is_deployed_is_one_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Parsed(Exception):
        pass

    def parse(self: CommandParser, words: list[str]) -> None:
        argparse.ArgumentParser.parse_args(self, words)
        raise Parsed

    monkeypatch.setattr(CommandParser, "parse_args", parse)
    lines = list(commands_in(DEPLOY))
    assert [words[0] for words in lines] == ["run", *["node"] * 5]
    for words in lines:
        with pytest.raises(Parsed):
            load_command(words[0])(words[1:])


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    program = Path(sys.executable).with_name("shoal")
    path = tmp_path / "shoal@inference.service"
    path.write_text(unit().replace("/opt/shoal/bin/shoal", str(program)))
    said = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    ours = [line for line in (said.stdout + said.stderr).splitlines() if "shoal" in line]
    assert (said.returncode, ours) == (0, [])


def test_what_is_deployed_is_in_the_source_archive() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "deploy" in project["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
