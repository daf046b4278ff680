"""What the demo of pre-training says of what its trainers said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from rich.console import Console

from p2p.machine import load_or_create_key
from roles.contract import decode_run_untrusted
from roles.demo.command import main, prepare
from roles.demo.pretraining import KILLED, LATE, TRAINERS, PretrainingDemo
from roles.own.layout import RunFolder
from roles.own.nodes import LocalNodes
from roles.own.rounds import draw, figures, healths_of
from roles.own.stage import says
from roles.own.view import work_of
from roles.trainer.config import TrainerConfig
from roles.trainer.role import DilocoMember, Trainer

pytest.importorskip("torch", reason="a trainer cannot be made without torch")

DEMO = PretrainingDemo()
NAMES = {f"id of {name}": name for name in TRAINERS}


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


def complaints(healths: dict[str, dict[str, Any]]) -> str:
    return "\n".join(DEMO.complaints(figures(healths, NAMES), promised=True))


def shown(healths: dict[str, dict[str, Any]], *killed: str) -> str:
    console = Console(record=True, width=200)
    console.print(draw(healths, 10.0, 24, list(killed)))
    found = {**figures(healths, NAMES), "seconds": 10.0, "cpu_seconds": 20.0}
    for line in DEMO.summary(found, promised=True):
        console.print(line)
    return console.export_text()


def test_what_went_as_promised_has_no_complaint() -> None:
    healths = {name: health() for name in TRAINERS}
    assert complaints(healths) == ""
    assert figures(healths, NAMES)["factor"] == 6 * 1000 * 3200 / 80_000
    text = shown(healths, KILLED)
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
        (
            TRAINERS[0],
            {"rounds": [dict(one, loss=2.0) for one in health()["rounds"]]},
            "2.000 to 2.000",
        ),
    ],
)
def test_each_promise_that_is_broken_is_named(
    name: str, changes: dict[str, Any], said: str
) -> None:
    healths = {one: health() for one in TRAINERS}
    healths[name] = health(**changes)
    assert said in complaints(healths)


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
def test_whatever_trainers_say_the_demo_draws_it_and_sums_it_up(said: dict[str, Any]) -> None:
    """In a terminal it ended after ten seconds with ``KeyError: 'rounds'``."""
    told = {name: said if said.get("algorithm") == "diloco" else {} for name in TRAINERS}
    for healths in (told, told | {TRAINERS[1]: health()}, told | {TRAINERS[0]: health()}):
        assert max(map(len, shown(healths).splitlines())) <= 160
        assert complaints(healths) or any(healths.values())


async def test_its_run_names_all_trainers_and_a_health_counts_once_the_run_is_read(
    tmp_path: Path,
) -> None:
    """A trainer that had not read its run yet was drawn as one of reinforcement learning."""
    run = prepare(DEMO, 3, RunFolder(tmp_path))
    assert run == decode_run_untrusted((tmp_path / "run.shoal").read_bytes())
    keys = [load_or_create_key(tmp_path / name / "key") for name in TRAINERS]
    assert run.terms.trainers == tuple(key.peer_id for key in keys)
    assert run.terms.validators == ()
    async with trio.open_nursery() as nursery:
        nodes = LocalNodes(RunFolder(tmp_path), run, DEMO.cast, nursery)
        for said in (Trainer.from_config({}).health(), DilocoMember(TrainerConfig()).health()):
            nodes.children[TRAINERS[0]].status = {"roles": {"trainer": said}}
            DEMO.draw(nodes, 1.0)
            assert list(DEMO.news(nodes)) == []
            assert figures(healths_of(nodes), NAMES)["losses"] == []
            assert "-1" not in says({"trainer-1": {"roles": {"trainer": said}}})
            assert work_of({"trainer": said}) == "starts"


def test_it_takes_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--diloco", "--model", str(tmp_path)]) == 2
    assert "leave --model out" in capsys.readouterr().err
