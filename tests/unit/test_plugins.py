"""Roles, commands and run readers from other packages, and one sentence when there is none."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import ClassVar, Self

import pytest

from p2p.errors import BadMessage, ConfigError
from p2p.identity import verify
from p2p.node import entries, plugins
from p2p.node.commands import COMMANDS, command_names, command_summaries, load_command
from p2p.node.node import Node
from p2p.node.plugins import load_role, load_roles, open_run_untrusted
from tests.support.runs import RUN


class Idle:
    name: ClassVar[str] = "idle"

    def __init__(self, table: Mapping[str, object]) -> None:
        self.table = table

    @classmethod
    def from_config(cls, table: Mapping[str, object]) -> Self:
        return cls(table)

    async def run(self, node: Node) -> None: ...  # nothing to do

    def health(self) -> dict[str, object]:
        return {}


THIS = f"{__name__}:Idle"


def install(patch: pytest.MonkeyPatch, *points: tuple[str, str, str]) -> None:
    """Pretend that these entry points (group, name, value) are all there are."""

    def find(group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for of, name, value in points if of == group]

    patch.setattr(entries, "entry_points", find)


def test_a_role_comes_by_module_and_class_or_by_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    role = load_role(THIS, {"idle": {"a": 1}})
    assert isinstance(role, Idle)
    assert role.table == {"a": 1}
    install(monkeypatch, (plugins.ROLES, "lazy", THIS))
    role = load_role("lazy", {})
    assert isinstance(role, Idle)
    assert role.table == {}


def test_every_failure_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch, (plugins.ROLES, "lazy", THIS), (plugins.ROLES, "torn", "nowhere.at.all:X")
    )
    for name, sentence in [
        ("watcher", "there is no role 'watcher'; installed are: lazy, none, torn (or give mod"),
        ("lasy", "there is no role 'lasy'; did you mean 'lazy'? (or give module:Class)"),
        ("torn", "the role 'torn' cannot be loaded from nowhere.at.all:X: No module named 'n"),
        ("p2p.errors:Nothing", "the role 'p2p.errors:Nothing' cannot be loaded"),
        ("p2p.errors:ShoalError", "'p2p.errors:ShoalError' is no role: it lacks from_config"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_role(name, {})
        assert str(caught.value).startswith(sentence)
    with pytest.raises(ConfigError, match="one role is given twice"):
        load_roles([THIS, "lazy"], {})


def test_shoals_own_plugins_are_installed() -> None:
    assert {"demo", "node", "sim"} <= set(command_names())
    with pytest.raises(
        ConfigError,
        match=r"no command 'fly'; there are: calibrate, chat, .*models, node, .*sim",
    ):
        load_command("fly")
    with pytest.raises(ConfigError, match=r"no command 'nod'; did you mean 'node'\?"):
        load_command("nod")


def test_a_table_of_no_role_is_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    """``[role.infrence]`` was accepted, and its settings had no effect."""
    install(monkeypatch, (plugins.ROLES, "lazy", THIS))
    with pytest.raises(
        ConfigError, match=r"\[role\.lasy\]: no role is called so; did you mean 'lazy'\?"
    ):
        load_roles(["none"], {"lasy": {}})
    # installed: the file is shared by several nodes
    assert load_roles(["none"], {"lazy": {}}) == []
    # not installed, and given as module:Class
    assert len(load_roles([THIS], {"idle": {}})) == 1


def test_run_documents_are_opened_by_the_installed_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert open_run_untrusted(RUN.document, verify) == RUN
    with pytest.raises(BadMessage):
        open_run_untrusted(b"garbage", verify)
    install(monkeypatch)
    with pytest.raises(ConfigError, match="no reader of run files is installed; install Shoal"):
        open_run_untrusted(RUN.document, verify)


def test_a_command_that_cannot_be_loaded_says_so_in_the_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, (COMMANDS, "torn", "no_such_module:main"))
    assert dict(command_summaries())["torn"].startswith("(the command 'torn' cannot be loaded")
