"""The tiny model against itself: decoding equals prefill, honest work passes, cheats do not."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from p2p.errors import ConfigError
from proofs.checks import Limits, Reason, Verdict, judge
from proofs.sampling import DrawRule
from roles.engines.base import Completion, EngineError, Group, GroupTask, Row, Sampling
from roles.engines.config import ROWS, EngineConfig
from roles.engines.torch import sampler, scorer
from roles.engines.torch.engine import TorchEngine
from roles.engines.torch.files import encode_weights, load_weights, save_folder
from roles.engines.torch.model import TransformerModel
from roles.envs.sort import END, SortEnvironment
from roles.rl.recipes import SORTER
from tests.support.toys import sorting_engine

ENDS = frozenset({END})
SAMPLING = Sampling(temperature=1.0, max_new_tokens=12, group_size=4)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def make_model(seed: int = 0, sharpness: float = 1.0) -> TransformerModel:
    """A random model whose head is scaled up, so that its distributions are as peaked as a
    trained one's.
    """
    model = TransformerModel(SORTER)
    model.initialise(seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(20 * sharpness)
    return model


def make_tasks(count: int, completions: int = 4) -> list[GroupTask]:
    environment = SortEnvironment()
    return [
        GroupTask(
            group,
            environment.task(hashlib.sha256(f"task {group}".encode()).digest()).prompt,
            tuple(
                hashlib.sha256(f"draw {group} {slot}".encode()).digest()
                for slot in range(completions)
            ),
        )
        for group in range(count)
    ]


@torch.inference_mode()
def read_states(
    model: TransformerModel, tasks: list[GroupTask], groups: list[Group]
) -> dict[int, NDArray[np.float32]]:
    """The scorer's states of each completion, numbered through all groups."""
    found: dict[int, list[NDArray[np.float32]]] = {}
    for batch in scorer.read_groups(model, tasks, groups):
        for states in batch:
            before = sum(len(group.completions) for group in groups[: states.group])
            for (completion, count), rows in zip(
                states.parts, states.rows.split([count for _, count in states.parts]),
                strict=True,
            ):  # fmt: skip
                assert len(rows) == count
                found.setdefault(before + completion, []).append(rows.numpy())
    return {number: np.concatenate(rows) for number, rows in sorted(found.items())}


def verdicts(
    model: TransformerModel, tasks: list[GroupTask], groups: list[Group]
) -> list[Reason]:
    evidence = [one.evidence for one in scorer.score(model, tasks, groups, SAMPLING, ENDS)]
    return [judge(one, Limits.fp32()).reason for one in evidence]


def test_the_shape_has_the_documented_size() -> None:
    model = TransformerModel(SORTER)
    assert sum(weight.numel() for weight in model.parameters()) == 105_088
    assert "model.layers.1.self_attn.q_norm.weight" in model.state_dict()
    assert "lm_head.weight" in model.state_dict()


def test_decoding_equals_prefill() -> None:
    model, tasks = make_model(), make_tasks(12)
    states: dict[int, list[NDArray[np.float32]]] = {}
    groups = sampler.draw(
        model, tasks, SAMPLING, ENDS, keep=lambda n, rows: states.setdefault(n, []).append(rows)
    )
    assert len({len(task.prompt) for task in tasks}) > 2  # padding mattered
    replayed = read_states(model, tasks, groups)
    assert replayed.keys() == states.keys()
    for number, own in replayed.items():
        assert np.abs(np.concatenate(states[number]) - own).max() < 1e-4


def test_padding_and_company_change_nothing() -> None:
    model, tasks = make_model(), make_tasks(20)
    together = sampler.draw(model, tasks, SAMPLING, ENDS)
    alone = [sampler.draw(model, [task], SAMPLING, ENDS)[0] for task in tasks]
    for one, other in zip(together, alone, strict=True):
        assert [c.tokens for c in one.completions] == [c.tokens for c in other.completions]


def test_completions_end_once_or_at_the_limit() -> None:
    model, tasks = make_model(sharpness=0.3), make_tasks(30)
    completions = [
        c for one in sampler.draw(model, tasks, SAMPLING, ENDS) for c in one.completions
    ]
    assert {len(one.tokens) for one in completions} >= {1, 12}
    for one in completions:
        assert END not in one.tokens[:-1]
        assert one.tokens[-1] == END or len(one.tokens) == SAMPLING.max_new_tokens
        assert len(one.logprobs) == len(one.tokens)
        assert max(one.logprobs) <= 0


def test_completions_that_wait_for_an_answer_do_not_keep_the_engine_busy() -> None:
    ends = frozenset(range(SORTER.vocabulary))
    drawing = sampler.Sampler(make_model(), ends, DrawRule.CDF)
    tasks = make_tasks(3, completions=ROWS // 2 + 1)  # more than there are places
    drawing.add(tasks, replace(SAMPLING, turns=2, heard=1))
    while drawing.has_work:
        for _ in range(10 * SAMPLING.max_new_tokens):
            drawing.step()
        assert not drawing.can_step
        drawing.hear([Row(row.group, row.slot, (1,)) for row in drawing.paused()])
    assert [len(group.completions) for _, group in drawing.take_ended()] == [129] * 3


def test_honest_work_is_accepted() -> None:
    model, tasks = make_model(), make_tasks(40)
    groups = sampler.generate(model, tasks, SAMPLING, ENDS)
    scored = scorer.score(model, tasks, groups, SAMPLING, ENDS)
    assert {judge(one.evidence, Limits.fp32()).verdict for one in scored} == {Verdict.ACCEPTED}
    for one, group in zip(scored, groups, strict=True):
        claimed = [value for each in group.completions for value in each.logprobs]
        replayed = np.frombuffer(one.logprobs, dtype="<f2")
        assert one.evidence.tokens == len(replayed)
        assert np.allclose(replayed, claimed, rtol=2**-11, atol=1e-4)


def test_gumbel_draws_replay_and_other_draws_do_not() -> None:
    model, tasks = make_model(), make_tasks(10)
    groups = sampler.generate(model, tasks, SAMPLING, ENDS, DrawRule.GUMBEL)
    honest = scorer.score(model, tasks, groups, SAMPLING, ENDS, DrawRule.GUMBEL)
    assert {judge(one.evidence, Limits.fp32()).reason for one in honest} == {
        Reason.WITHIN_LIMITS
    }
    assert max(one.evidence.gap_max for one in honest) == 0
    by_cdf = sampler.generate(model, tasks, SAMPLING, ENDS)
    for wrong, rule in ((by_cdf, DrawRule.GUMBEL), (groups, DrawRule.CDF)):
        seen = scorer.score(model, tasks, wrong, SAMPLING, ENDS, rule)
        reasons = {judge(one.evidence, Limits.fp32()).reason for one in seen}
        assert reasons <= {Reason.DRAW_GAP, Reason.DRAW_DISTANCE}


def test_stale_weights_are_seen() -> None:
    model, tasks = make_model(), make_tasks(20)
    groups = sampler.generate(model, tasks, SAMPLING, ENDS)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():  # as far as one step of the recipe moves them
            weight.add_(4e-4 * torch.randn(weight.shape, generator=generator))
    reasons = verdicts(model, tasks, groups)
    assert reasons.count(Reason.WITHIN_LIMITS) == 0
    assert set(reasons) & {Reason.MANTISSA_MEAN, Reason.EXPONENTS}


def test_other_weights_are_seen() -> None:
    model, tasks = make_model(), make_tasks(20)
    groups = sampler.generate(make_model(seed=1), tasks, SAMPLING, ENDS)
    assert set(verdicts(model, tasks, groups)) == {Reason.EXPONENTS}


def with_last_proof(group: Group, proof: bytes) -> Group:
    *others, last = group.completions
    return replace(group, completions=(*others, replace(last, proof=proof)))


def test_an_empty_or_foreign_proof_is_malformed() -> None:
    model, tasks = make_model(), make_tasks(2)
    groups = sampler.generate(model, tasks, SAMPLING, ENDS)
    bad = [
        with_last_proof(groups[0], b""),
        with_last_proof(groups[1], b"\0" * len(groups[1].completions[-1].proof)),
    ]
    assert set(verdicts(model, tasks, bad)) == {Reason.MALFORMED_PROOF}


def test_a_token_outside_the_vocabulary_is_our_mistake() -> None:
    model, tasks = make_model(), make_tasks(1)
    group = Group(0, (Completion((1, 50), (-1.0, -1.0)),))
    with pytest.raises(EngineError, match="vocabulary"):
        scorer.score(model, tasks, [group], SAMPLING, ENDS)


def test_weights_go_through_a_file(tmp_path: Path) -> None:
    model, other = make_model(), make_model(seed=3)
    save_folder(model, tmp_path, context=64, end_tokens=(END,))
    load_weights(other, tmp_path / "model.safetensors")
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "Qwen3ForCausalLM"
    ]


def test_other_readers_agree_on_the_container(tmp_path: Path) -> None:
    loader = pytest.importorskip("safetensors.torch")
    model = make_model()
    loaded = loader.load(encode_weights(model))
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())
    path = tmp_path / "theirs.safetensors"
    loader.save_file(
        {name: weight.bfloat16() for name, weight in model.state_dict().items()}, path
    )
    load_weights(model, path)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(encode_weights(TransformerModel(replace(SORTER, width=32))))
    with pytest.raises(EngineError, match="shape"):
        load_weights(make_model(), path)
    path.write_bytes(encode_weights(TransformerModel(replace(SORTER, layers=1))))
    with pytest.raises(EngineError, match="names differ"):
        load_weights(make_model(), path)
    path.write_bytes(b"nonsense")
    with pytest.raises(EngineError, match="not a weights file"):
        load_weights(make_model(), path)


def test_an_engine_says_what_is_missing() -> None:
    engine = TorchEngine(EngineConfig())
    with pytest.raises(EngineError, match="no weights"):
        engine.submit([], SAMPLING)
    with pytest.raises(EngineError, match="not opened"):
        engine.answer([], SAMPLING)
    with pytest.raises(ConfigError, match="50 tokens"):
        TorchEngine(sorting_engine(shape=replace(SORTER, vocabulary=10))).open("none", "")
