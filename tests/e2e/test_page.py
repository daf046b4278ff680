"""A real node's page and socket, from before it has a run."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.node_process import START_SECONDS, node

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
            running.process.kill()  # -9: the socket's file stays behind
            running.process.wait()
        assert (tmp_path / "api.sock").exists()
