"""A word that there is not is answered with the nearest one, by every command."""

from __future__ import annotations

import traceback
from typing import NoReturn

import pytest

from p2p.node.commands import load_command
from p2p.node.usage import interruptible

SLIPS = {
    "demo": (["--sed", "1"], "there is no option --sed; did you mean '--seed'?"),
    "node": (["--bootstap", "x"], "there is no option --bootstap; did you mean '--bootstrap'?"),
    "push": ([".", "--expct", "1"], "there is no option --expct; did you mean '--expect'?"),
    "sim": (["run", "churn", "--seds=1"], "there is no option --seds; did you mean '--seeds'?"),
    "run": (["strat"], "there is no command 'strat'; did you mean 'start'?"),
    "models": (["fech"], "there is no command 'fech'; did you mean 'fetch'?"),
    "node --log": (["--log", "warn"], "no value of --log 'warn'; did you mean 'warning'?"),
    "run invite": (
        ["invite", "--rol", "x", "--expirs", "3d"],
        "there is no option --expirs; did you mean '--expires'?",
    ),
    "doctor --port": (["--port", "abc"], "argument --port: 'abc' is no whole number"),
    "node --bootstrap": (
        ["--bootstrap", "1.2.3.4:4001"],
        "argument --bootstrap: '1.2.3.4:4001' is no address; write for example"
        " /ip4/1.2.3.4/tcp/4001/p2p/ID, as that node prints it",
    ),
    "doctor": (
        ["--role"],
        "there is no option --role; there are: --bootstrap, --data, --help,"
        " --json, --open, --port, --run",
    ),
}


@pytest.mark.parametrize("command", SLIPS)
def test_a_misspelt_word_is_answered_with_the_nearest(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, sentence = SLIPS[command]
    with pytest.raises(SystemExit, match="2"):
        load_command(command.split()[0])(arguments)
    assert capsys.readouterr().err.endswith(f"{sentence}\n")


def test_a_crash_says_what_was_raised_however_deep() -> None:
    """A trainer ended with eleven nested groups, and nothing in its log said why."""

    def crash() -> NoReturn:
        error: Exception = ZeroDivisionError("deep down")
        for _ in range(20):
            error = ExceptionGroup("a nursery", [error])
        raise error

    with pytest.raises(ExceptionGroup) as caught:
        interruptible(crash)
    assert "ZeroDivisionError: deep down" in "".join(traceback.format_exception(caught.value))
