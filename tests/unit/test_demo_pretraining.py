"""What the demo of pre-training says of what its trainers said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from roles.contract import decode_run_untrusted
from roles.demo.command import main
from roles.demo.page import says
from roles.demo.pretraining import (
    KILLED,
    LATE,
    TRAINERS,
    PretrainingNodes,
    PretrainingPlan,
    complaints,
    draw,
    figures,
    report,
)
from roles.demo.view import work_of
from roles.trainer.config import TrainerConfig
from roles.trainer.role import DilocoMember, Trainer


class Nodes(PretrainingNodes):
    """Nodes that were heard, without processes."""

    def __init__(self, folder: Path, healths: dict[str, dict[str, Any]]) -> None:
        self.plan = PretrainingPlan(seed=0, folder=folder)
        self.peers = {f"id of {name}": name for name in TRAINERS}
        self.killed = True
        self._healths = healths

    def health(self, name: str) -> dict[str, Any]:
        return self._healths[name]


def health(**changes: Any) -> dict[str, Any]:
    rounds = [
        {"step": step, "digest": f"d{step}", "members": 3, "summed": 3, "loss": 3.0 - step / 4}
        for step in range(1, 9)
    ]
    return {
        "algorithm": "diloco", "step": 8, "weights": 1000, "inner_steps": 800, "tokens": 9,
        "sent": 20_000,
        "utilised": 0.9, "training_loss": 2.0, "sample": "shoal", "rounds": rounds,
        "members": [f"id of {name}" for name in TRAINERS if name != KILLED], **changes,
    }  # fmt: skip


def test_what_went_as_promised_has_no_complaint(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, {name: health() for name in TRAINERS})
    found = figures(nodes)
    assert list(complaints(found)) == []
    assert found["factor"] == 6 * 1000 * 3200 / 80_000
    console = Console(record=True, width=200)
    console.print(draw(nodes, 10.0))
    report(console, {**found, "seconds": 10.0, "cpu_seconds": 20.0}, [])
    text = console.export_text()
    assert "killed" in text
    assert "2.750 → 1.000 nats" in text


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (TRAINERS[0], {"members": [f"id of {name}" for name in TRAINERS]}, "still a member"),
        (TRAINERS[0], {"members": ["id of trainer-1"]}, f"{LATE} came late"),
        (
            TRAINERS[2],
            {"rounds": [{"step": 3, "digest": "other", "loss": None}]},
            "differed at 1",
        ),
        (TRAINERS[2], {"sent": 10**7}, "times less"),
    ],
)
def test_each_promise_that_is_broken_is_named(
    tmp_path: Path, name: str, changes: dict[str, Any], said: str
) -> None:
    healths = {one: health() for one in TRAINERS}
    healths[name] = health(**changes)
    assert any(said in line for line in complaints(figures(Nodes(tmp_path, healths))))


@pytest.mark.parametrize(
    "said",
    [
        {},
        Trainer.from_config({}).health(),
        DilocoMember(TrainerConfig()).health(),
        {"algorithm": "diloco", "step": -1, "steps": 24},
        health(rounds=[], step=0, members=[], training_loss=None, sample="", sent=0),
    ],
    ids=["nothing", "before the run is read", "before the engine", "before the session", "new"],
)
def test_whatever_trainers_say_the_demo_draws_it_and_sums_it_up(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    """In a terminal it ended after ten seconds with ``KeyError: 'rounds'``."""
    told = {name: said if said.get("algorithm") == "diloco" else {} for name in TRAINERS}
    for healths in (told, told | {TRAINERS[1]: health()}, told | {TRAINERS[0]: health()}):
        nodes = Nodes(tmp_path, healths)
        nodes.killed = False
        console = Console(record=True, width=80)
        console.print(draw(nodes, 10.0))
        found = figures(nodes)
        report(console, {**found, "seconds": 10.0, "cpu_seconds": 20.0}, [])
        assert list(complaints(found)) or healths[TRAINERS[0]]
        assert max(map(len, console.export_text().splitlines())) <= 160


async def test_a_health_is_of_pretraining_once_the_run_is_read(tmp_path: Path) -> None:
    """A trainer that had not read its run yet was drawn as one of reinforcement learning."""
    import trio

    async with trio.open_nursery() as nursery:
        nodes = PretrainingNodes(PretrainingPlan(seed=3, folder=tmp_path), nursery)
        for health in (
            Trainer.from_config({}).health(),
            DilocoMember(TrainerConfig()).health(),
        ):
            nodes.children[TRAINERS[0]].status = {"roles": {"trainer": health}}
            draw(nodes, 1.0)
            assert figures(nodes)["losses"] == []
            assert "-1" not in says({"trainer-1": {"roles": {"trainer": health}}})
            assert work_of({"trainer": health}) == "starts"


def test_a_loss_that_does_not_fall_is_named(tmp_path: Path) -> None:
    flat = [dict(one, loss=2.0) for one in health()["rounds"]]
    healths = {one: health(rounds=flat) for one in TRAINERS}
    assert any(
        "2.000 to 2.000" in line for line in complaints(figures(Nodes(tmp_path, healths)))
    )


async def test_its_run_file_names_all_trainers_and_no_validator(tmp_path: Path) -> None:
    import trio

    async with trio.open_nursery() as nursery:
        nodes = PretrainingNodes(PretrainingPlan(seed=3, folder=tmp_path), nursery)
    run = decode_run_untrusted((tmp_path / "run.shoal").read_bytes())
    assert run == nodes.run
    assert [nodes.peers[str(peer)] for peer in run.terms.trainers] == list(TRAINERS)
    assert run.terms.validators == ()


def test_it_takes_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--diloco", "--model", str(tmp_path)]) == 2
    assert "leave --model out" in capsys.readouterr().err
