"""Every live view and progress bar in a terminal of 80 x 24, ended by Ctrl-C."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from roles.own.__main__ import main as run_main
from tests.sweeps import DEEP
from tests.terminal import ROOT, terminal

LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0")
SHOAL = ("-c", "import sys; from p2p.node.commands import main; sys.exit(main())")
SCENARIO = str(ROOT / "sim" / "scenarios" / "churn.toml")
SORTING = str(ROOT / "examples" / "sorting" / "draft.toml")


@dataclass(frozen=True, kw_only=True)
class View:
    """A command with a live view."""

    command: Callable[[Path], tuple[str, ...]]
    shows: str  # what stands on the screen while it works
    says: tuple[str, ...]  # what it says after Ctrl-C: what was done, and how it goes on
    codes: tuple[int, ...] = (130,)
    is_heavy: bool = True  # whether only deep runs play it
    files: tuple[str, ...] = ()  # the sources that draw it


def mute_index() -> str:
    """The address of a package index that accepts and says nothing, until this process ends."""
    index = socket.create_server(("127.0.0.1", 0))
    INDEXES.append(index)
    return f"http://127.0.0.1:{index.getsockname()[1]}/simple"


INDEXES: list[socket.socket] = []


def with_run(folder: Path) -> str:
    assert run_main(["init", str(folder / "run"), "--draft", SORTING]) == 0
    return str(folder / "run")


def with_file(folder: Path) -> str:
    (folder / "[bold]w.bin").write_bytes(bytes(4096))
    return str(folder / "[bold]w.bin")


VIEWS = {
    "demo": View(
        command=lambda at: (*SHOAL, "demo", "--steps", "2", "--data", str(at / "d")),
        shows="warming up",
        says=("peers", "held-out reward", "interrupted", "it goes on there with: shoal demo",
              "the whole run as a page: "),
        files=("roles/own/stage.py",),
    ),
    "demo --diloco": View(
        command=lambda at: (*SHOAL, "demo", "--diloco", "--steps", "2", "--data", str(at)),
        shows="round 0",
        says=("rounds", "interrupted", "it goes on there with: shoal demo --diloco",
              "the whole run as a page: "),
        is_heavy=False,
    ),
    "run start": View(
        command=lambda at: (*SHOAL, "run", "start", with_run(at)),
        shows="trainer ",
        says=("as a page", "goes on"),
    ),
    "node": View(
        command=lambda at: (
            *SHOAL, "node", "--data", str(at / "n"), *LOOPBACK, "--run", node_run(at),
        ),
        shows="policy   none yet",
        says=("the same command line goes on where this node was",),
        codes=(0,),
        is_heavy=False,
        files=("p2p/node/cli.py",),
    ),
    "sim run": View(
        command=lambda at: (*SHOAL, "sim", "run", SCENARIO, "--nodes", "400"),
        shows="virtual s",
        says=("nothing is kept, and the same line begins again",),
        files=("sim/cli.py",),
    ),
    "sim sweep": View(
        command=lambda at: (*SHOAL, "sim", "sweep", SCENARIO, "--seeds", "1-99", "--jobs", "1"),
        shows="1 of 99 runs",
        says=("runs had ended",),
    ),
    "calibrate": View(
        command=lambda at: (
            *(*SHOAL, "calibrate", "--run", node_run(at), "--sequences", "4096"),
            *("--learner", str(at / "run" / "trainer" / "learner.toml")),
        ),
        shows="honest",
        says=("nothing is kept, and the same line begins again",),
        files=("roles/calibrate/command.py",),
    ),
    "models fetch": View(
        command=lambda at: (*SHOAL, "models", "fetch", "smollm2", "--out", str(at / "m")),
        shows="download",
        says=("nothing is kept, and the same line begins again",),
        files=("roles/models/fetch.py",),
    ),
    "push": View(
        command=lambda at: (
            *SHOAL, "push", with_file(at), "--data", str(at / "p"), *LOOPBACK,
        ),
        shows="no other machine yet",
        says=("[bold]w.bin", "the same command line goes on"),
        codes=(0,),
        files=("p2p/cast/view.py",),
    ),
    "chat": View(
        command=lambda at: (str(ROOT / "examples" / "chat.py"), "alice"),
        shows="others join with",
        says=("the same line comes back",),
        codes=(0,),
    ),
    "topic": View(
        command=lambda at: (str(ROOT / "examples" / "topic.py"), "alice"),
        shows="node topic.mjs",
        says=("the same line comes back",),
        codes=(0,),
    ),
    "drop": View(
        command=lambda at: (str(ROOT / "examples" / "drop.py"), "give", with_file(at)),
        shows="drop.py take",
        says=("the same line begins again",),
        codes=(1,),
    ),
}  # fmt: skip


def node_run(at: Path) -> str:
    folder = with_run(at)
    return str(next(Path(folder).glob("*.shoal")))


@pytest.mark.parametrize(
    "name", [name for name, view in VIEWS.items() if DEEP or not view.is_heavy]
)
def test_ctrl_c_in_a_terminal_says_what_was_done_and_how_it_goes_on(
    name: str, tmp_path: Path
) -> None:
    view = VIEWS[name]
    env = {"PIP_INDEX_URL": mute_index(), "TMPDIR": str(tmp_path)}
    with terminal(*view.command(tmp_path), cwd=tmp_path, **env) as shown:
        shown.wait(view.shows)
        shown.press_ctrl_c()
        code = shown.end()
    assert "Traceback" not in shown.said
    assert code in view.codes, shown.said[-3000:]
    assert [one for one in view.says if one not in shown.said] == [], shown.said[-3000:]
    for page in re.findall(r"page:? +(/\S+)", shown.said):
        assert "<html" in Path(page).read_text(encoding="utf-8")


@pytest.mark.deep
@pytest.mark.parametrize("option", [(), ("--diloco",)])
def test_a_demo_in_a_terminal_comes_to_its_end(option: tuple[str, ...], tmp_path: Path) -> None:
    """After ten seconds: ``KeyError: 'rounds'``."""
    command = (*SHOAL, "demo", *option, "--steps", "2", "--data", str(tmp_path / "d"))
    with terminal(*command, TMPDIR=str(tmp_path)) as shown:
        assert shown.end() == 0, shown.said[-3000:]
    assert "the whole run as a page: " in shown.said


def test_every_source_that_draws_a_live_view_is_played() -> None:
    """What draws a live view, by what it calls."""
    drawing = re.compile(
        r"\bLive\(|\bProgress\(\s*(?!facts)[\w*\"]|console\.status\(|report_progress, "
    )
    sources = {
        str(path.relative_to(ROOT))
        for package in ("p2p", "roles", "sim", "examples")
        for path in (ROOT / package).rglob("*.py")
        if drawing.search(path.read_text(encoding="utf-8"))
    }
    assert sources - {"roles/validator/role.py", "roles/inference/role.py"} <= {
        file for view in VIEWS.values() for file in view.files
    }
