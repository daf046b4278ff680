"""The tiny model against itself: decoding equals prefill, honest work passes, cheats do not."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from p2p.errors import ConfigError
from proofs.checks import Limits, Reason, judge
from proofs.sampling import DrawRule
from roles.engines.base import Completion, EngineError, Group, GroupTask, Row, Sampling
from roles.engines.config import ROWS, EngineConfig
from roles.engines.torch import sampler, scorer
from roles.engines.torch.engine import TorchEngine
from roles.engines.torch.files import encode_weights, load_weights
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
    trained one's."""
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


def with_last_proof(group: Group, proof: bytes) -> Group:
    *others, last = group.completions
    return replace(group, completions=(*others, replace(last, proof=proof)))


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


def test_an_engine_says_what_is_missing() -> None:
    engine = TorchEngine(EngineConfig())
    with pytest.raises(EngineError, match="no weights"):
        engine.submit([], SAMPLING)
    with pytest.raises(EngineError, match="not opened"):
        engine.answer([], SAMPLING)
    with pytest.raises(ConfigError, match="50 tokens"):
        TorchEngine(sorting_engine(shape=replace(SORTER, vocabulary=10))).open("none", "")
