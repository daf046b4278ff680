"""``[lora]``: what learns, what a policy is, and what leaves as a folder of PEFT."""

import math
import shutil
import struct
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call

from p2p.errors import ConfigError
from p2p.shardcast import PolicyVersion
from roles.engines.adapters import (
    DIGEST_BYTES,
    LORA as LORA_NUMBERS,
    NUMBERS,
    SEAL,
    TRAVELS,
    read_adapter,
)
from roles.engines.base import EngineError, TrainingGroup
from roles.engines.config import Autocast, EngineConfig, memory_needed
from roles.engines.torch import sampler
from roles.engines.torch.files import load_weights
from roles.engines.torch.learner import TorchLearner
from roles.engines.torch.lora import Adapter, merged
from roles.engines.torch.model import TransformerModel
from roles.models import safetensors
from roles.models.bundle import read_config
from roles.models.errors import BadModel
from roles.models.safetensors import RawTensor
from roles.own.__main__ import main as run_main
from roles.rl.learner import LearnerConfig, Lora
from roles.rl.recipes import NETWORK
from tests.model_folders import LLAMA, make_folder
from tests.support.shardcast_town import Town, everybody
from tests.unit.test_torch_families import (
    ENDS,
    SAMPLING,
    large_weights,
    make_tasks,
    write_weights,
)

LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))
LEARNER: LearnerConfig = replace(NETWORK.learner, warm_up=None, rate=1e-2, ramp=1, lora=LORA)
CONFIG = EngineConfig(
    shape=LLAMA, context=128, end_tokens=(1,), environment=None, learner=LEARNER
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("run") / "model")
    write_weights(folder, large_weights(LLAMA))
    return folder


def begin(base: Path, checkpoint: Path, config: EngineConfig = CONFIG) -> TorchLearner:
    learner = TorchLearner(config)
    learner.open(checkpoint, base)
    return learner


def groups_of(learner: TorchLearner) -> list[TrainingGroup]:
    tasks = make_tasks(6)
    groups = sampler.draw(learner.model, tasks, SAMPLING, ENDS)
    return [
        TrainingGroup(task.prompt, group.completions, (1.0, 0.0, 0.0, 0.5))
        for task, group in zip(tasks, groups, strict=True)
    ]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    model = TransformerModel(read_config(folder).shape)
    load_weights(model, folder)
    return dict(model.named_parameters())


def test_gradients_are_those_of_a_pass_through_both_factors() -> None:
    model = TransformerModel(LLAMA)
    model.initialise(0)
    adapter = Adapter(model, LORA, seed=1)
    adapter.take_base()
    kept = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in adapter.weights.values():
        weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
    adapter.merge()
    tokens = torch.arange(24).view(2, 12)
    for _ in range(2):  # gradients add up
        model(tokens).square().mean().backward()
    factors = {name: w.detach().clone().requires_grad_() for name, w in adapter.weights.items()}
    whole = {
        f"{name.removesuffix('.lora_B')}.weight": kept[f"{name.removesuffix('.lora_B')}.weight"]
        + 2.0 * up @ factors[name.replace("lora_B", "lora_A")]
        for name, up in factors.items()
        if name.endswith("lora_B")
    }
    (2 * functional_call(model, {**kept, **whole}, (tokens,)).square().mean()).backward()
    assert len(factors) == 2 * 3 * LLAMA.layers
    for name, factor in factors.items():
        ours = adapter.weights[name].grad
        assert factor.grad is not None
        torch.testing.assert_close(ours, factor.grad, rtol=1e-4, atol=1e-7)
    assert all(weight.grad is None for weight in model.parameters())


def test_a_sum_has_the_same_bits_however_it_is_cut_and_computed() -> None:
    """One operation after the other, each rounded: numpy is another machine's arithmetic."""
    rng = np.random.default_rng(0)
    base, down, up = (
        rng.normal(size=size).astype(np.float32) for size in ((700, 300), (16, 300), (700, 16))
    )
    total = up[:, :1] * down[:1]
    for one in range(1, 16):
        total = total + up[:, one : one + 1] * down[one : one + 1]
    for kind in (torch.float32, torch.bfloat16):
        before = torch.from_numpy(base).to(kind)
        out = torch.empty(700, 300)
        merged(before, torch.from_numpy(down), torch.from_numpy(up), 0.7, out)
        wanted = total * np.float32(0.7) + before.float().numpy()
        assert np.array_equal(out.numpy(), wanted)


def test_targets_learn_and_nothing_else(base: Path, tmp_path: Path) -> None:
    learner = begin(base, tmp_path / "checkpoint")
    learner.save(None, tmp_path / "0")
    assert (tmp_path / "0/model.safetensors").read_bytes() == (
        base / "model.safetensors"
    ).read_bytes()
    groups = groups_of(learner)
    before = learner.advantages(groups)
    report = learner.update(groups, before)
    assert abs(report.k3) < 1e-6
    assert report.gradient_norm > 0
    for _ in range(3):
        learner.step(groups)
    learner.save(tmp_path / "checkpoint", tmp_path / "4")
    was, new = weights_of(tmp_path / "0"), weights_of(tmp_path / "4")
    moved = {name.split(".")[-2] for name in was if not torch.equal(was[name], new[name])}
    assert moved == set(LORA.targets)
    for name, weight in learner.model.named_parameters():
        assert torch.equal(new[name], weight.bfloat16().float())  # rounded once
    expected = learner.step(groups)
    again = begin(base, tmp_path / "checkpoint")
    assert again.step_number == 4
    assert again.step(groups) == expected
    pairs = zip(learner.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    full = begin(base, tmp_path / "none", replace(CONFIG, learner=replace(LEARNER, lora=None)))
    full.step(groups)
    full.save(tmp_path / "full", None)
    small, large = ((tmp_path / name).stat().st_size for name in ("checkpoint", "full"))
    assert small < large / 2


def test_a_cpu_with_bfloat16_instructions_learns_too(base: Path, tmp_path: Path) -> None:
    """Gradients under autocast were refused by float32 weights."""
    config = replace(CONFIG, autocast=Autocast.ON)
    learner = begin(base, tmp_path / "checkpoint", config)
    assert learner.step(groups_of(learner)).gradient_norm > 0


async def test_what_travels_leads_to_the_policy(base: Path, tmp_path: Path) -> None:
    learner = begin(base, tmp_path / "none")
    async with AsyncExitStack() as stack:
        trainer, other = await everybody(Town(tmp_path), stack, 2)
        learner.save(None, tmp_path / "0/v0")
        await trainer.shardcast.publish(PolicyVersion(0), "v0")
        for version in (1, 2):
            learner.step(groups_of(learner))
            learner.save(None, tmp_path / f"0/v{version}")
            await other.shardcast.wait_policy(PolicyVersion(version - 1))
            adapter = f"v{version}{TRAVELS}", PolicyVersion(0)
            await trainer.shardcast.publish(
                PolicyVersion(version), f"v{version}", adapter=adapter
            )
            (sent,) = trainer.shardcast.manifest(PolicyVersion(version)).patches
            assert sent.is_adapter
            await other.shardcast.wait_policy(PolicyVersion(version))
        found = other.world.disk.locate(other.shardcast.weights(PolicyVersion(2)))
    for name, weight in weights_of(tmp_path / "0/v2").items():
        assert torch.equal(weight, weights_of(Path(found))[name])


def test_what_lora_cannot_do_is_said_in_a_sentence(base: Path, tmp_path: Path) -> None:
    other = replace(CONFIG, learner=replace(LEARNER, lora=replace(LORA, targets=("qkv",))))
    with pytest.raises(ConfigError, match="targets 'qkv', and the model has down_proj, gate"):
        TorchLearner(other)
    with pytest.raises(ConfigError, match="begin with a model"):
        TorchLearner(CONFIG).open(tmp_path / "checkpoint", None)
    with pytest.raises(ConfigError, match="the checkpoint is lost"):
        TorchLearner(CONFIG).adopt(base, 3, base)
    learner = begin(base, tmp_path / "checkpoint")
    learner.save(tmp_path / "checkpoint", None)
    wider = replace(CONFIG, learner=replace(LEARNER, lora=replace(LORA, rank=5)))
    for config in (wider, replace(CONFIG, learner=replace(LEARNER, lora=None))):
        with pytest.raises(EngineError, match="another \\[lora\\]"):
            begin(base, tmp_path / "checkpoint", config)
    with pytest.raises(ValueError, match="without targets"):
        replace(LORA, targets=())


def test_a_file_without_lora_keeps_its_digest_and_one_with_it_needs_less_memory() -> None:
    plain = replace(LEARNER, lora=None)
    assert plain.digest != LEARNER.digest
    large = replace(LLAMA, width=1024, feed_forward=4096, head_width=64, layers=12)
    needs = [memory_needed(large, CONFIG.sampling, 128, one) for one in (plain, LEARNER)]
    assert needs[1] < needs[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_is_exported_for_peft(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(base, run / "model")
    checkpoint = run / "trainer/checkpoint"
    learner = begin(base, checkpoint)
    learner.save(checkpoint, None)
    groups = groups_of(learner)
    for _ in range(2):
        learner.step(groups)
    learner.save(checkpoint, None)
    out = tmp_path / "adapter"
    assert run_main(["export", str(run), "--adapter", "-o", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert run_main(["export", str(base), "--adapter", "-o", str(tmp_path / "x")]) != 0
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    opened = peft.PeftModel.from_pretrained(theirs, out).eval()
    tokens = torch.arange(5, 65).view(2, 30)
    with torch.inference_mode():
        logits = learner.model.logits(learner.model(tokens).flatten(0, 1))
        exact = opened(tokens).logits.flatten(0, 1)
        assert float((logits - exact).abs().max()) < 1e-4
        with opened.disable_adapter():
            assert float((opened(tokens).logits.flatten(0, 1) - exact).abs().max()) > 1e-2
    assert math.isclose(opened.peft_config["default"].lora_alpha, LORA.alpha)


@pytest.mark.parametrize("rank", [math.nan, math.inf])
def test_a_checkpoint_whose_rank_is_no_number_is_refused(rank: float, tmp_path: Path) -> None:
    numbers = {
        NUMBERS: RawTensor("U8", (16,), bytes(16)),
        LORA_NUMBERS: RawTensor("U8", (8,), struct.pack("<ff", rank, 1.0)),
    }
    path = tmp_path / "checkpoint"
    path.write_bytes(SEAL + bytes(DIGEST_BYTES) + safetensors.encode(numbers))
    with pytest.raises(BadModel, match="is no checkpoint of a learner"):
        read_adapter(path)
