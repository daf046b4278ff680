"""What a confined worker sees: command lines and profiles, as text."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from p2p.sandbox import Confinement, Containment
from p2p.sandbox.confinement import Mechanism, is_below
from p2p.sandbox.installation import Installation, find_installation
from p2p.sandbox.launch import bwrap_command, launch, seatbelt_profile

BWRAP = Containment(mechanism=Mechanism.BUBBLEWRAP, program="/usr/bin/bwrap")
ROOTS = replace(BWRAP, is_switching=True)
INSTALLATION = Installation(
    python="/home/ann/venv/bin/python",
    system=("/usr", "/etc/ld.so.cache"),
    links=(("/lib", "usr/lib"),),
    readable=("/home/ann/venv/lib", "/opt/py/lib"),
    search=("/home/ann/shoal",),
    private=("/home", "/run", "/tmp"),
    devices=("/dev/nvidia0",),
)
GIVEN = Confinement(readable=("/home/ann/.shoal/store/model",), memory=1 << 32)
ENGINE = Confinement(sees_machine=True, writable=("/home/ann/.shoal/trainer",), required=False)


def command(
    containment: Containment, confined: Confinement, **changed: object
) -> list[list[str]]:
    """By options, each with what belongs to it."""
    words = bwrap_command(
        containment,
        confined,
        INSTALLATION,
        **{  # type: ignore[arg-type]
            "folder": "/home/ann/.shoal",
            "secrets": ["/home/ann/.shoal/key"],
            "aliases": {},
            **changed,
        },
    )
    options: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not options:
            options.append([word])
        else:
            options[-1].append(word)
    return options


def test_strangers_code_has_no_terminal_no_capability_and_nothing_to_write() -> None:
    """tests/attacks/test_sandbox.py tries what else it is to lack."""
    options = command(BWRAP, GIVEN)
    assert ["--new-session"] in options
    assert ["--cap-drop", "ALL"] in options
    kinds = {option[0] for option in options if "bind" in option[0]}
    assert kinds == {"--ro-bind", "--ro-bind-try", "--dev-bind"}
    assert ["--unshare-net"] not in command(BWRAP, replace(ENGINE, network=True))


def test_roots_workers_become_another_user_who_can_go_through_every_folder() -> None:
    """The folders that bwrap makes by itself are root's alone."""
    options = command(ROOTS, GIVEN)
    assert options[options.index(["--dir", "/home/ann"]) - 1] == ["--perms", "0755"]


def test_a_link_is_seen_under_both_names() -> None:
    options = command(BWRAP, GIVEN, aliases={"/data/m": "/home/ann/.shoal/store/model"})
    assert ["--ro-bind-try", "/home/ann/.shoal/store/model", "/data/m"] in options
    assert ["--dir", "/data"] in options
    engine = command(BWRAP, ENGINE, aliases={"/tmp/t": "/home/ann/.shoal/trainer", "/t": "/x"})
    assert ["--bind", "/home/ann/.shoal/trainer", "/tmp/t"] in engine
    assert not any("/t" in option for option in engine), "the machine has that link itself"


def test_the_profile_for_macos() -> None:
    """As text: it was written without a Mac, and never run on one."""
    profile = seatbelt_profile(GIVEN, INSTALLATION, secrets=["/home/ann/.shoal/key"])
    lines = profile.splitlines()
    assert lines[:2] == ["(version 1)", "(deny default)"]
    assert lines[-1] == '(deny file-read* file-write* (subpath "/home/ann/.shoal/key"))'
    assert '(allow file-read* (subpath "/home/ann/.shoal/store/model"))' in lines
    for word in ("network", "process-fork", "file-write*)", "iokit"):
        assert word not in profile
    engine = seatbelt_profile(ENGINE, INSTALLATION, secrets=[])
    assert '(allow file-read* file-write* (subpath "/home/ann/.shoal/trainer"))' in engine
    links = "(deny file-write-create (vnode-type SYMLINK))"
    assert engine.index("file-write* (subpath") < engine.index(links), "the last rule decides"
    assert engine.index("(allow file-read*)") < engine.index(
        '(deny file-read* (subpath "/home"'
    )
    odd = seatbelt_profile(replace(GIVEN, readable=('/a"b\\c',)), INSTALLATION, secrets=[])
    assert '(subpath "/a\\"b\\\\c")' in odd
    assert profile.count("(") == profile.count(")")


def test_of_a_checkout_only_what_can_be_imported_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["package/__init__.py", "module.py", "x-1.dist-info/METADATA", "data/key", ".env"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "key").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = find_installation()
    seen = {Path(path).name for path in found.readable if is_below(path, [str(tmp_path)])}
    assert seen == {"package", "module.py", "x-1.dist-info"}
    assert str(tmp_path) in found.search


def test_a_home_on_the_path_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python puts the current folder there, and people write PYTHONPATH=$HOME."""
    (tmp_path / "diary.py").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{tmp_path.parent}")
    found = find_installation()
    assert not [path for path in found.readable if is_below(path, [str(tmp_path)])]
    assert is_below(str(tmp_path), found.private)


def test_the_interpreter_and_this_package_are_seen() -> None:
    found = find_installation()
    shown = [*found.readable, *found.system]
    for path in sys.executable, os.path.realpath(sys.executable), os.__file__, pytest.__file__:
        assert is_below(path, shown), path
    assert is_below(str(Path(__file__).parents[2] / "p2p"), shown)


def test_a_workers_environment_is_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "CUDA_VISIBLE_DEVICES", "LC_ALL"):
        monkeypatch.setenv(name, "1")
    given = launch(["m"], replace(GIVEN, variables=("LC_*",)), BWRAP, folder="/nowhere")
    assert {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "CUDA_VISIBLE_DEVICES"}.isdisjoint(
        given.variables
    )
    assert given.variables["LC_ALL"] == "1"
    assert (given.variables["HOME"], given.variables["OMP_NUM_THREADS"]) == ("/tmp", "1")
    assert given.command[-1] == "m"
