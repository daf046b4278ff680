"""Architectures that transformers computes: from its folder to verdict, step and folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proofs.checks import Limits, Verdict, judge
from roles.contract.core.shape import Dtype
from roles.engines.base import EngineError, Group, GroupTask, Sampling
from roles.engines.config import EngineConfig, GpuOptions
from roles.engines.torch import sampler, scorer
from roles.engines.torch.engine import TorchEngine
from roles.engines.torch.files import load_weights
from roles.engines.torch.hosted import HostedModel, new_model
from roles.engines.torch.model import TransformerModel
from roles.engines.torch.policy import write_policy
from roles.models.bundle import check_weights, read_config
from roles.models.config import HOSTED
from roles.rl.recipes import NETWORK
from tests.hosted_folders import make_theirs, save_theirs
from tests.support.tasks import make_tasks, taught
from tests.sweeps import swept

pytest.importorskip("transformers", reason="pip install -e '.[transformers]'")

CPU = torch.device("cpu")
ENDS = frozenset(range(1, 5))
SAMPLING = Sampling(temperature=1.0, max_new_tokens=40, group_size=4)
families = pytest.mark.parametrize("architecture", swept(sorted(HOSTED), 3))


def open_model(
    folder: Path, dtype: Dtype = Dtype.FLOAT32, hosted: str = ""
) -> TransformerModel:
    config = read_config(folder)
    shape = replace(config.shape, architecture=hosted or config.shape.architecture)
    model = new_model(shape, dtype, CPU, folder)
    model.lay_for_reading()
    load_weights(model, folder)
    return model


def tokens_of(groups: list[Group]) -> list[tuple[int, ...]]:
    return [one.tokens for group in groups for one in group.completions]


def assert_accepted(
    model: TransformerModel, tasks: list[GroupTask], groups: list[Group]
) -> int:
    """None of the tokens, whose number is returned, is off its seeded draw."""
    evidence = [one.evidence for one in scorer.score(model, tasks, groups, SAMPLING, ENDS)]
    assert {judge(one, Limits.fp32()).verdict for one in evidence} == {Verdict.ACCEPTED}
    assert sum(one.off[0] for one in evidence) == 0
    return sum(one.tokens for one in evidence)


@pytest.mark.deep
@families
def test_a_family_is_computed_drawn_and_replayed(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = make_theirs(architecture)
    folder = save_theirs(theirs, tmp_path / "model")
    check_weights(folder, read_config(folder))
    model, tasks = open_model(folder), make_tasks(40, tokens=range(5, 320))
    assert isinstance(model, HostedModel)
    tokens = torch.randint(0, 320, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        exact = theirs(tokens).logits
        ours = model.logits(model(tokens).flatten(0, 1)).view_as(exact)
    assert float((ours - exact).abs().max()) < 1e-4

    monkeypatch.setattr(sampler, "ROWS", 23)  # so that rows are let in as others end
    groups = sampler.generate(model, tasks, SAMPLING, ENDS)
    assert max(map(len, tokens_of(groups))) > 32
    assert assert_accepted(model, tasks, groups) >= 2000
    some, beside = tasks[:3], groups[:3]
    with monkeypatch.context() as patched:
        patched.setattr(scorer, "ROW_TOKENS", 0)  # prompts are cached, answers in blocks
        for block in (4, 64):
            patched.setattr(scorer, "BLOCK", block)
            assert_accepted(model, some, beside)
    monkeypatch.setattr(sampler, "CACHE_BYTES", 1)  # one row at a time
    monkeypatch.setattr(sampler, "CACHE_BLOCK", 3)
    alone = sampler.generate(model, some, SAMPLING, ENDS)
    assert tokens_of(alone) == tokens_of(beside)

    # states behind an answer, against transformers without a cache
    prompt, answer = some[0].prompt, beside[0].completions[0].tokens
    with torch.inference_mode():
        logits = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1)[torch.arange(len(answer)), list(answer)]
    drawn = np.array(beside[0].completions[0].logprobs)
    assert np.abs(logprobs.numpy() - drawn).max() < 1e-4


@families
def test_a_policy_goes_through_a_model_bit_by_bit(architecture: str, tmp_path: Path) -> None:
    base = save_theirs(make_theirs(architecture).bfloat16(), tmp_path / "base")
    model = open_model(base)
    write_policy(model, tmp_path / "policy", base)
    for path in base.iterdir():
        if path.name != "generation_config.json" or (tmp_path / "policy" / path.name).exists():
            assert (tmp_path / "policy" / path.name).read_bytes() == path.read_bytes()
    half = open_model(base, Dtype.BFLOAT16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16, torch.float32}
    tasks = make_tasks(2, tokens=range(5, 320))
    groups = sampler.generate(half, tasks, SAMPLING, ENDS)
    scored = scorer.score(half, tasks, groups, SAMPLING, ENDS)
    loose = replace(Limits.bf16(), gap_mean=1.0, gap_scale=1.0)
    assert {judge(one.evidence, loose).verdict for one in scored} == {Verdict.ACCEPTED}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that our decoder computes, and transformers, too: with slowed frequencies."""
    scaling = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    theirs = make_theirs("LlamaForCausalLM", attention_bias=False, rope_parameters=scaling)
    return save_theirs(theirs, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    theirs = make_theirs("MistralForCausalLM", sliding_window=None)
    return save_theirs(theirs, tmp_path_factory.mktemp("mistral"))


both = pytest.mark.parametrize("name", ["llama", "mistral"])


@both
def test_both_bodies_accept_each_others_proofs(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    classes = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
    own, hosted = open_model(folder), open_model(folder, hosted=classes[name])
    assert (type(own), type(hosted)) == (TransformerModel, HostedModel)
    tokens = torch.arange(5, 155)[None]
    with torch.inference_mode():
        logits = [model.logits(model(tokens)[0]) for model in (own, hosted)]
    assert float((logits[0] - logits[1]).abs().max()) < 1e-4
    if name == "llama":
        flat = new_model(replace(own.shape, rope_scaling=None), Dtype.FLOAT32, CPU, None)
        load_weights(flat, folder)
        with torch.inference_mode():  # the scaling shows
            assert float((flat.logits(flat(tokens)[0]) - logits[0]).abs().max()) > 0.1
    tasks = make_tasks(30, tokens=range(5, 320))
    for drawing, scoring in ((own, hosted), (hosted, own)):
        groups = sampler.generate(drawing, tasks, SAMPLING, ENDS)
        assert assert_accepted(scoring, tasks, groups) > 1500


def config_of(folder: Path, hosted: str = "", **changes: Any) -> EngineConfig:
    shape = replace(read_config(folder).shape, architecture=hosted)
    learner = replace(NETWORK.learner, warm_up=None, rate=1e-3, ramp=1)
    return EngineConfig(
        shape=shape, context=256, end_tokens=(1,), environment=None, learner=learner, **changes
    )


def test_both_bodies_learn_the_same(llama: Path, tmp_path: Path) -> None:
    learnt, losses = [], []
    for name, hosted in (("own", ""), ("hosted", "LlamaForCausalLM")):
        engine = TorchEngine(config_of(llama, hosted))
        assert engine.open(str(tmp_path / f"{name}.checkpoint"), str(llama)) == 0
        engine.load(str(llama))
        tasks = make_tasks(6, tokens=range(5, 320))
        groups = sampler.draw(engine._loaded(), tasks, SAMPLING, ENDS)
        rewarded = taught(tasks, groups, (1.0, 0.0, 0.0, 0.5))
        report = engine.step(rewarded)
        assert abs(report.k3) < 1e-6
        losses.append((report.gradient_norm, report.entropy))
        policy = tmp_path / name
        engine.save(str(tmp_path / f"{name}.checkpoint"), str(policy))
        assert (policy / "config.json").read_bytes() == (llama / "config.json").read_bytes()
        learnt.append(dict(open_model(policy, hosted=hosted).named_parameters()))
        again = TorchEngine(config_of(llama, hosted))
        assert again.open(str(tmp_path / f"{name}.checkpoint"), str(llama)) == 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert learnt[0].keys() == learnt[1].keys()
    for key, weight in learnt[0].items():  # a step in Adam's first update is about the rate
        assert float((weight - learnt[1][key]).abs().mean()) < 5e-5


def test_what_cannot_be_computed_is_said_in_a_sentence(llama: Path, tmp_path: Path) -> None:
    hosted = config_of(llama, "LlamaForCausalLM")
    with pytest.raises(EngineError, match="begins with a base"):
        TorchEngine(hosted).open(str(tmp_path / "checkpoint"), "")
    with pytest.raises(EngineError, match="leave out ranks, recompute and offload"):
        TorchEngine(replace(hosted, gpus=GpuOptions(recompute=True))).open(
            str(tmp_path / "checkpoint"), str(llama)
        )
    other = replace(hosted, shape=replace(hosted.shape, layers=4))
    with pytest.raises(EngineError, match="layers is 3 there, 4 in the run"):
        TorchEngine(other).load(str(llama))


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"pad_token_id": 10**9}, "Padding_idx"),
        ({"query_pre_attn_scalar": 0}, "negative power"),
        ({"attention_dropout": "x"}, "attention_dropout"),
        ({"layer_types": ["a"]}, "layer_types"),
        ({"partial_rotary_factor": 1e9}, "from 0 to 1"),
        ({"rope_scaling": {"rope_type": "linear", "rotary_pct": 1e9}}, "from 0 to 1"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
    ],
)
def test_a_file_that_harms_transformers_is_refused_with_a_sentence(
    tmp_path: Path, odd: dict[str, Any], said: str
) -> None:
    save_theirs(make_theirs("Gemma2ForCausalLM"), tmp_path)
    shape = read_config(tmp_path).shape
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **odd}))
    with pytest.raises(EngineError, match=said):
        new_model(shape, Dtype.FLOAT32, CPU, tmp_path)
