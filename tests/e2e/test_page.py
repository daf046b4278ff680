"""A real node's page and socket, from before it has a run."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.e2e.node_process import START_SECONDS, node
from tests.support.runs import RUN

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
