"""The command line, a node's page and its socket, as real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from p2p.node.cli import key_main
from p2p.node.commands import main
from p2p.node.dashboard.commands import peers_main, status_main
from p2p.node.folders import running
from roles.contract.core.file import sign_run
from roles.doctor import main as doctor_main
from tests.e2e.forked import Forks, Surroundings
from tests.e2e.node_process import LOOPBACK, START_SECONDS, fail, node
from tests.support.runs import OWNER, RUN, TERMS

ROOT = Path(__file__).parent.parent.parent
PLUGIN = ROOT / "examples" / "greeter"


def test_a_bare_node_says_who_and_where_it_is_and_waits(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "p2p.node", *LOOPBACK],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"HOME": str(tmp_path)},
    )
    assert process.stdout is not None
    try:
        block = [process.stdout.readline() for _ in range(7)]
        assert re.fullmatch(r"node     12D3Koo\w+\n", block[0])
        assert re.fullmatch(r"address  /ip4/127\.0\.0\.1/tcp/\d+/p2p/12D3Koo\w+\n", block[1])
        assert block[2:4] == ["roles    none\n", f"data     {tmp_path}/.shoal\n"]
        assert re.fullmatch(r"sandbox  (bubblewrap|seatbelt|none)\b.*\n", block[4])
        assert block[5].startswith(
            "next     no run yet: start again with --bootstrap ADDR of a member"
        )
        assert process.poll() is None
        process.terminate()
        assert process.wait(timeout=3) == 0
    finally:
        process.kill()
        process.communicate()
    key = tmp_path / ".shoal" / "key"
    assert key.stat().st_mode & 0o777 == 0o600


@pytest.mark.deep
def test_the_identity_lasts_and_the_folder_is_locked(tmp_path: Path) -> None:
    with node(tmp_path / "n") as first:
        started = first.line()
        assert started["event"] == "started"
        assert started["sandbox"] in {"bubblewrap", "seatbelt", "none"}
        assert started["addrs"][0].endswith(started["peer"])
        code, error = fail("--data", str(tmp_path / "n"))
        assert (code, error) == (
            1,
            f"error: another node is using {tmp_path / 'n'}; give this one its own --data\n",
        )
        assert first.interrupt() == 0
    with node(tmp_path / "n") as again:
        assert again.line()["peer"] == started["peer"]


def test_a_newcomer_needs_one_address(tmp_path: Path) -> None:
    run_file = tmp_path / "run.shoal"
    run_file.write_bytes(RUN.document)
    with node(tmp_path / "a", "--run", str(run_file), "--status", "0.1") as first:
        addr = first.line()["addrs"][0]
        assert first.line()["run"] == RUN.id.hex()
        with node(tmp_path / "b", "--bootstrap", addr, "--status", "0.1") as second:
            peer = second.line()["peer"]
            joined = second.line()
            assert (joined["event"], joined["owner"]) == ("joined", str(OWNER.peer_id))
            second.line_with("members", 1)
            first.line_with("members", 1)
            assert second.interrupt() == 0
        # Its run is pinned, and a newer edition of it is taken from the first node it meets.
        with node(tmp_path / "b", "--bootstrap", addr) as second:
            assert second.line()["peer"] == peer
            assert second.line()["epoch"] == 1
        assert first.interrupt() == 0


@pytest.mark.deep
def test_a_newer_edition_is_never_rolled_back(tmp_path: Path) -> None:
    old, new = tmp_path / "1.shoal", tmp_path / "2.shoal"
    old.write_bytes(RUN.document)
    new.write_bytes(sign_run(replace(TERMS, epoch=2), OWNER).document)
    for file in (new, old):
        with node(tmp_path / "n", "--run", str(file)) as running:
            running.line()
            assert running.line()["epoch"] == 2


def test_a_node_dies_with_its_parent(tmp_path: Path) -> None:
    with node(tmp_path / "n", "--die-with-parent") as child:
        child.line()
        assert child.process.stdin is not None
        child.process.stdin.close()
        assert child.process.wait(timeout=3) == 0
        child.process.stdin = None  # communicate() would flush it


@pytest.mark.parametrize(
    ("arguments", "exit_code", "sentence"),
    [
        (["--role", "traner"], 2, "there is no role 'traner'; did you mean 'trainer'?"),
        (
            ["--role", "nowhere:Role"],
            2,
            "the role 'nowhere:Role' cannot be loaded from nowhere:Role: No module",
        ),
        (
            ["--config", "missing.toml"],
            2,
            "missing.toml cannot be read: No such file or directory",
        ),
        (
            ["--run", "missing.shoal"],
            2,
            "the run file missing.shoal cannot be read: No such file or directory",
        ),
        (
            ["--run", str(ROOT / "LICENSE")],
            2,
            f"the run file {ROOT / 'LICENSE'} cannot be used: ",
        ),
        (
            ["--listen", "/ip4/203.0.113.1/tcp/1"],
            1,
            "cannot listen at /ip4/203.0.113.1/tcp/1: ",
        ),
        (["--data", "/proc/nowhere"], 1, "/proc/nowhere cannot be used: "),
        (
            ["--config", "node.toml"],
            2,
            "node.toml: membership: there is no key 'intervall'; did you mean 'interval'?",
        ),
    ],
)
def test_every_error_is_one_sentence(
    arguments: list[str], exit_code: int, sentence: str, tmp_path: Path, shells: Forks
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "node.toml").write_text("[membership]\nintervall = 1\n")
    line = ["node", "--data", str(tmp_path / "n"), *arguments]
    code, _, error = shells.run(line, folder, Surroundings())
    assert code == exit_code
    assert error.startswith(f"error: {sentence}")
    assert error.count("\n") == 1


def test_wrong_usage_is_exit_code_2(tmp_path: Path, shells: Forks) -> None:
    for line in (["--bootstrap", "localhost"], ["--colour"]):
        assert shells.run(["node", *line], tmp_path / "here", Surroundings())[0] == 2


def test_shoal_dispatches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("demo", "node", "run", "sim"):
        assert any(re.match(rf"  {name} +[A-Z].{{20,}}\.$", line) for line in lines), name
    assert all(len(line) <= 80 for line in lines)
    assert main(["fly"]) == 2
    assert "there is no command 'fly'" in capsys.readouterr().err


def test_the_version_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"shoal \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the plugin package is installed, apart from Shoal."""
    source = tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(PLUGIN, source)
    target = tmp_path_factory.mktemp("site")
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([sys.executable, *words, target, source], check=True, timeout=120)
    return target


@pytest.mark.parametrize("role", ["greeter", "shoal_plugin_example:Greeter"])
def test_a_role_from_another_package_runs(role: str, installed: Path, tmp_path: Path) -> None:
    run_file, config = tmp_path / "run.shoal", tmp_path / "node.toml"
    run_file.write_bytes(RUN.document)
    config.write_text('[role.greeter]\nword = "ahoy"\n')
    common = ["--run", str(run_file), "--config", str(config), "--status", "0.1"]
    with node(tmp_path / "n", "--role", role, *common, PYTHONPATH=str(installed)) as running:
        assert running.line()["roles"] == [role]
        running.line()
        assert running.line()["roles"] == {"greeter": {"word": "ahoy", "greeted": 0}}
        assert running.interrupt() == 0


def test_the_wheel_holds_four_packages_and_nothing_else(tmp_path: Path) -> None:
    (wheel,) = built("wheel", ROOT, tmp_path)
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    packages = {name for name in names if not name.endswith(".dist-info")}
    assert packages == {"p2p", "proofs", "roles", "sim"}


def test_the_sdist_holds_what_it_lists_and_no_key(tmp_path: Path) -> None:
    """It packed whatever lay in the checkout, a node's folder included."""
    tree = tmp_path / "tree"
    wanted = {"p2p", "roles", "proofs", "sim", "bench", "docs", "tests"}
    files = {"pyproject.toml", "README.md", "LICENSE", "Makefile", "constraints.txt"}
    for name in wanted:
        (tree / name).mkdir(parents=True)
        (tree / name / "__init__.py").touch()
    for name in files:
        shutil.copy(ROOT / name, tree)
    (tree / "worker").mkdir()
    (tree / "worker" / "key").write_bytes(bytes(32))
    (archive,) = built("sdist", tree, tmp_path)
    with tarfile.open(archive) as packed:
        names = {name.split("/", 2)[1] for name in packed.getnames()}
    assert names == wanted | files | {"PKG-INFO"}


def built(target: str, tree: Path, folder: Path) -> list[Path]:
    """What hatchling makes of a tree."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target]
    subprocess.run(
        [*command, "--directory", str(folder)],
        cwd=tree, check=True, capture_output=True, timeout=START_SECONDS,
    )  # fmt: skip
    return [path for path in folder.iterdir() if path.is_file()]


def test_a_node_is_named_by_its_folder_or_the_runs_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``status`` took ``--data DIR``, ``pause`` took ``DIR``, and nobody remembered which."""
    (tmp_path / "run.shoal").write_bytes(RUN.document)
    folder = tmp_path / "trainer"
    arguments = ("--run", str(tmp_path / "run.shoal"))
    with node(folder, *arguments) as one, node(tmp_path / "a", *arguments) as other:
        peer = one.line_with("event", "started")["peer"]
        one.line_with("event", "joined")
        other.line_with("event", "joined")
        for words in ([str(folder)], ["--data", str(folder)], [str(tmp_path)]):
            assert status_main([*words, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["own"] == peer
            assert key_main(words) == 0
            assert capsys.readouterr().out.strip() == peer
        assert status_main([str(tmp_path)]) == 0
        assert f"\n{tmp_path / 'a'}\n" in capsys.readouterr().out
        assert peers_main([str(tmp_path)]) == 0
        assert f"this is {folder}; there are {tmp_path / 'a'}" in capsys.readouterr().err
        assert status_main([str(folder), "--data", str(tmp_path)]) == 2
        if sys.platform == "linux":
            assert {folder, tmp_path / "a"} <= set(running())
        one.process.kill()
        one.process.wait()
        capsys.readouterr()
        assert status_main([str(folder)]) == 1
        said = capsys.readouterr().err
    assert "does not run (its log ends on " in said
    assert f"this starts it: shoal node --data {folder} --json --listen " in said
    doctor_main([str(folder)])
    assert f"the run {RUN.name!r}" in capsys.readouterr().out


SHOAL = str(Path(sys.executable).with_name("shoal"))


def test_a_node_without_a_run_shows_that_it_waits_for_one(tmp_path: Path) -> None:
    """Its socket answers a shell; killed and started again it answers as before."""
    silent = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWBmAwcd4PJNJvfV89HwE48nwkRmAgo8Vy3uQEyNNHBox2"
    for _ in range(2):
        with node(
            tmp_path,
            "--dashboard",
            "127.0.0.1:0",
            "--bootstrap",
            silent,
            "--log-format",
            "json",
        ) as running:
            url = running.line_with("event", "started")["dashboard"]
            assert url.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(f"{url}healthz", timeout=START_SECONDS) as answer:
                assert answer.read() == b"alive\n"
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{url}readyz", timeout=START_SECONDS)
            told = subprocess.run(
                [SHOAL, "status", "--data", str(tmp_path)],
                capture_output=True,
                text=True,
                check=True,
                timeout=START_SECONDS,
            )
            assert "no run yet" in told.stdout
            assert "nobody has dialled it yet (its address is for" in told.stdout
            running.process.kill()  # -9: the socket's file stays behind
            running.process.wait()
        assert (tmp_path / "api.sock").exists()


def test_an_owner_pauses_a_node_at_its_socket_and_nobody_at_its_page(tmp_path: Path) -> None:
    """It says so in its status, and still does after a restart."""
    run_file, data = tmp_path / "run.shoal", tmp_path / "data"
    run_file.write_bytes(RUN.document)

    def shoal(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([SHOAL, *words], capture_output=True, text=True,
                              timeout=START_SECONDS, check=False)  # fmt: skip

    for way in ("pause", "resume"):
        where = ("--dashboard", "127.0.0.1:0", "--run", str(run_file))
        with node(data, *where) as running:
            url = running.line_with("event", "started")["dashboard"]
            running.line_with("event", "joined")
            order = urllib.request.Request(f"{url}api/{way}", method="POST")
            with pytest.raises(urllib.error.HTTPError, match="405"):
                urllib.request.urlopen(order, timeout=START_SECONDS)
            if way == "resume":
                assert (
                    "shoal resume lets it go on" in shoal("status", "--data", str(data)).stdout
                )
            (own,) = json.loads(shoal("peers", "--json", "--data", str(data)).stdout).values()
            assert own["version"] == version("shoal")
            told = shoal(way, str(data))
            assert (told.returncode, told.stderr) == (0, "")
            assert told.stdout.startswith(f"{way}d")
    assert shoal("pause", str(tmp_path)).returncode == 1
