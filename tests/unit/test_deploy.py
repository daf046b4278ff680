"""What runs nodes for people: completion in shells, a systemd unit, containers."""

from __future__ import annotations

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

from p2p.node.commands import load_command, main
from p2p.node.completion import parser_of
from tests.unit.test_run_file import TRAINER

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
ASK = """
ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shoal; echo "${COMPREPLY[*]}"; }
"""


def test_a_shell_offers_commands_options_and_choices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    assert main(["--print-completion", "bash"]) == 0
    script = capsys.readouterr().out
    asked = {
        "shoal sta": "status",
        "shoal run cr": "create",
        "shoal run create --o": "--out",
        "shoal node --log-format ''": "text json",
        "shoal node --die": "",  # hidden from people
        "shoal sim sweep --level ''": "0 1 2 3",
        "shoal node --data ''": "",  # files, which the shell knows
        "shoal --print-completion z": "zsh",
    }
    lines = [f"ask {words}" for words in asked]
    said = subprocess.run(
        ["bash", "--norc", "-u"], input="\n".join([script, ASK, *lines]), text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert said.stdout.split("\n")[:-1] == list(asked.values())
    assert main(["--print-completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X bashcompinit")
    assert main(["--print-completion", "fish"]) == 2


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


def test_every_command_line_that_is_deployed_is_one_of_ours() -> None:
    lines = list(commands_in(DEPLOY))
    assert [words[0] for words in lines] == ["run", *["node"] * 5]
    for words in lines:
        parser = parser_of(load_command(words[0]))
        assert parser is not None
        parser.parse_args(words[1:])


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
