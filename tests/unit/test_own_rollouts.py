"""What a trainer took, as the files that other programs open."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2p.errors import ConfigError
from p2p.identity import verify
from p2p.machine import RealWorld, open_world
from roles.contract.core.file import sign_run
from roles.own.__main__ import main
from roles.own.rollouts import export, open_finished
from roles.protocol.core.verdict import decode_verdict_untrusted
from roles.rl.learner import write_learner
from roles.shared.durable import Durable
from roles.trainer.core.buffer import GroupBuffer
from roles.trainer.curve import LearningCurve
from roles.trainer.inbox import Inbox
from roles.trainer.intake import ALIKE, Intake
from roles.trainer.metrics import Metrics
from roles.trainer.role import INBOX, ROLLOUTS
from roles.trainer.session import TrainerSession
from tests.support.runs import OWNER, TERMS
from tests.unit.trainer_life import (
    CONFIG,
    GROUPS,
    KEY,
    LEARNER,
    Ledger,
    ToldInbox,
    Unasked,
    lessons,
    place,
)

SAMPLING = replace(TERMS.sampling, group_size=4, submission=GROUPS, max_new_tokens=12)
RUN = sign_run(replace(TERMS, sampling=SAMPLING), OWNER)
PLACES = 6


async def trained(folder: Path, most: int = 0) -> Path:
    """A trainer's folder: all groups of four places went into steps 1 to 4, of which the first
    two places are covered by checkpoints."""
    node = folder / "trainer"
    async with open_world(node) as world:
        inbox = Inbox(world, INBOX, ROLLOUTS, most)
        for index in range(PLACES):
            await inbox.keep(place(index))
        for step in range(1, 5):
            await inbox.mark_used(lessons(step - 1), step)
        needed = {place(index).key: None for index in range(2, PLACES)}
        await inbox.forget_all_but(needed)
    (node / "run.shoal").write_bytes(RUN.document)
    (node / "learner.toml").write_text(write_learner(replace(LEARNER, run=RUN.name)))
    return node


async def test_each_answer_is_a_row_with_all_that_a_trainer_needs(tmp_path: Path) -> None:
    await trained(tmp_path)
    rows = list(open_finished(tmp_path).rows())
    assert len(rows) == 4 * 4 * GROUPS, "two of six places are forgotten"
    taught = {one.source: one for index in range(2, PLACES) for one in lessons(index)}
    for row in rows:
        drawn = [
            (token, logprob)
            for token, is_drawn, logprob in zip(
                row["input_ids"], row["completion_mask"], row["old_log_probs"], strict=True
            )
            if is_drawn
        ]
        verdict = decode_verdict_untrusted(row["signature"], verify)
        assert verdict.commitment.to_bytes() == row["commitment"]
        assert verdict.commitment.digest in taught
        answers = [
            list(zip(answer.tokens, answer.logprobs, strict=True))
            for one in lessons(row["place"])
            for answer in one.group.completions
        ]
        assert drawn in answers
        assert row["learnt_at"] == (row["place"] + 1 if row["place"] < 4 else None)
    for start in range(0, len(rows), 4):
        group = rows[start : start + 4]
        assert len({row["group_id"] for row in group}) == 1
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-5)


async def test_what_is_kept_beyond_its_checkpoints_is_exported_too(tmp_path: Path) -> None:
    await trained(tmp_path / "all", most=1 << 20)
    rows = list(open_finished(tmp_path / "all").rows())
    assert [row["learnt_at"] for row in rows[:: 4 * GROUPS]][:2] == [1, 2]
    assert len(rows) == PLACES * 4 * GROUPS
    size = len(place(0).to_bytes())
    await trained(tmp_path / "one", most=size + 100)
    kept = [path.name[:8] for path in (tmp_path / "one/trainer" / ROLLOUTS).iterdir()]
    assert kept == ["00000002"], "the newest stay"


async def test_pandas_and_datasets_read_the_parquet(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    await trained(tmp_path)
    out = tmp_path / "rollouts.parquet"
    assert export(tmp_path, out) == 0
    table = pandas.read_parquet(out)
    assert len(table) == 4 * 4 * GROUPS
    assert table.groupby("group_id").advantage.mean().abs().max() < 1e-5
    assert (
        table.completion_mask.map(sum) == table.old_log_probs.map(lambda x: (x < 0).sum())
    ).all()
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset(
        "parquet", data_files=str(out), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert found.num_rows == len(table)
    assert found[0]["input_ids"] == table.input_ids[0].tolist()
    assert not out.with_name("rollouts.parquet.part").exists()


async def test_traces_have_a_log_prob_for_each_drawn_token(tmp_path: Path) -> None:
    await trained(tmp_path)
    out = tmp_path / "traces.jsonl"
    assert export(tmp_path, out) == 0
    episodes = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(episodes) == 4 * 4 * GROUPS
    for episode in episodes:
        node = episode["traces"][0]["nodes"][-1]
        assert len(node["logprobs"]) == sum(node["mask"]) > 0
        assert len(node["mask"]) == len(node["token_ids"])


READER = """
import sys, pathlib
from verifiers.v1.trace import Trace
from verifiers.v1.task import WireTaskData
from verifiers.v1.state import State
from verifiers.v1.utils.trace_store import read_episodes
found = read_episodes(pathlib.Path(sys.argv[1]), Trace[WireTaskData, State, dict])
print(sum(len(node.token_ids) for one in found for node in one.traces[0].nodes))
"""


@pytest.mark.deep
async def test_verifiers_reads_the_traces(tmp_path: Path) -> None:
    python = os.environ.get("SHOAL_VERIFIERS_PYTHON")
    if not python:
        pytest.skip("SHOAL_VERIFIERS_PYTHON names no Python with verifiers 0.4.0")
    await trained(tmp_path)
    export(tmp_path, tmp_path / "traces.jsonl")
    done = await trio.run_process([python, "-c", READER, tmp_path], capture_stdout=True)
    tokens = sum(len(row["input_ids"]) for row in open_finished(tmp_path).rows())
    assert int(done.stdout) == tokens


def test_a_folder_without_answers_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="name the folder of a run that has started"):
        export(tmp_path, tmp_path / "x.parquet")
    assert main(["export", str(tmp_path), "--policy", "3", "-o", "x.jsonl"]) == 2
    assert "--policy is of a model" in capsys.readouterr().err


async def test_a_hundred_groups_alike_are_said_with_the_remedy_until_one_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, sampling = RealWorld(KEY, tmp_path), CONFIG.sampling
    node: Any = SimpleNamespace(world=world)
    ledger: Any = Ledger(tmp_path)
    inbox, durable = ToldInbox(world, "intake", tmp_path / "told"), Durable(world, "trainer")
    intake = Intake(node, sampling, ledger, inbox, GroupBuffer(sampling.lag), durable)
    curve = LearningCurve(world.disk, sampling, LEARNER, Unasked())
    other: Any = None
    engine: Any = SimpleNamespace(warning="")
    rest = (intake, other, curve, other, other, Metrics({}))
    session = TrainerSession(node, sampling.steps, LEARNER, engine, *rest)
    places = -(-ALIKE // sampling.submission)
    intake.note_unsent(KEY.peer_id, places - 1)
    assert session.warning == ""
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            intake.note_unsent(KEY.peer_id, 1)
    assert [one.split(" ")[0] for one in caplog.messages] == ["nothing_to_learn"]
    assert "Give easier tasks" in session.warning
    curve.learnt.greedy = 0.98
    assert "Give harder tasks" in session.warning
    await intake.take(place(0))
    assert session.warning == ""
