"""One suite for every engine: torch, fake, and vLLM where SHOAL_VLLM names a Python that has it
(``SHOAL_VLLM=.venv-vllm/bin/python pytest tests/conformance/test_engines.py``). Engines that
compute do it on the device that SHOAL_DEVICE names (``SHOAL_DEVICE=cuda``), else on the CPU.

An engine under test writes; a reference reads what it wrote. For engines that compute, the
reference is torch's scorer, in this process: two engines of one run must agree within the
run's limits. The fake engine is its own.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trio

from p2p.errors import ConfigError
from p2p.world import World
from proofs.checks import Limits, Reason, Shape, Verdict, check_shape, judge
from proofs.sampling import DrawRule
from roles.contract.core.shape import Family, ModelShape
from roles.engines.base import EngineError, Group, GroupTask, Sampling, Scored
from roles.engines.config import ROWS, DeviceProfile, EngineConfig, VllmOptions
from roles.engines.fake import FakeEngine
from roles.engines.torch.device import at_once, find_device
from roles.engines.torch.engine import TorchEngine
from roles.engines.torch.model import TransformerModel
from roles.engines.worker import draw_all
from roles.envs.sort import END
from roles.models import safetensors
from roles.models.safetensors import RawTensor
from tests.conformance.engine_process import EngineProcess, open_engine_process
from tests.support.tasks import make_tasks
from tests.sweeps import swept


class MemoryDisk:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.files[path]

    async def replace(self, path: str, data: bytes) -> None:
        self.files[path] = data

    async def rename(self, old: str, new: str) -> None:
        self.files[new] = self.files.pop(old)

    async def size(self, path: str) -> int | None:
        return len(self.files[path]) if path in self.files else None


class CountingWorld:
    """The doors that the fake engine uses; it counts the seconds that would be computed."""

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        self.spent = 0.0

    async def run_blocking(self, function: Callable[..., Any], *args: Any, cost: float) -> Any:
        self.spent += cost
        return function(*args)

    def buggify(self, name: str) -> bool:
        return False


VLLM = os.environ.get("SHOAL_VLLM", "")
DEVICE = os.environ.get("SHOAL_DEVICE", "cpu")
POLICIES = 5
SAMPLING = Sampling(temperature=1.0, max_new_tokens=40, group_size=4)
"""40 tokens: more than the rows of one chunk of a proof."""
SHAPE = ModelShape(
    vocabulary=80, width=64, layers=2, query_heads=4, key_heads=2, head_width=32,
    feed_forward=96, rope_base=100_000.0,
)  # fmt: skip
SHAPES = {
    Family.QWEN3: SHAPE,
    # vLLM takes width / query_heads for the width of Qwen2's heads
    Family.QWEN2: replace(SHAPE, qk_norm=False, qkv_bias=True, query_heads=2, key_heads=1),
    Family.LLAMA: replace(SHAPE, qk_norm=False, tied=True),
}
GUMBEL = (Family.QWEN2, Family.LLAMA)  # drawn by the rule of that name; Qwen3 by the other
CONFIG = EngineConfig(
    shape=SHAPE,
    context=64,
    end_tokens=(END, 7),  # a second token that ends an answer
    profile=DeviceProfile(policy_bytes=4096),
    vllm=VllmOptions(cache=64 * 1024 * 1024),
)
FOREIGN = '{"architectures": ["NoSuchModel"], "auto_map": {"AutoConfig": "code.Config"}}'
"""A stranger's configuration, which no engine reads."""
FAKE = "fake"
SUBJECTS = [f"{engine}-{family.value}" for engine in ("torch", "vllm") for family in Family]


class FakeProcess:
    """The fake engine, called as the others are."""

    def __init__(self) -> None:
        self.world = CountingWorld()
        self.engine = FakeEngine(
            cast(World, self.world), replace(CONFIG, kind=FAKE, end_tokens=(END,))
        )

    def load(self, weights: Path) -> None:
        trio.run(self.engine.load, str(weights))

    @property
    def has_room(self) -> bool:
        return self.engine.has_room

    def submit(self, tasks: Sequence[GroupTask], sampling: Sampling) -> None:
        trio.run(self.engine.submit, tasks, sampling)

    def advance(self, seconds: float) -> list[Group]:
        return trio.run(self.engine.advance)

    def drop(self) -> None:
        trio.run(self.engine.drop)

    def score(
        self, tasks: Sequence[GroupTask], groups: Sequence[Group], sampling: Sampling
    ) -> list[Scored]:
        return trio.run(self.engine.score, tasks, groups, sampling)

    def write_policies(self, folder: Path) -> list[Path]:
        paths = [folder / str(version) for version in range(POLICIES)]

        async def learn() -> None:
            await self.engine.open("checkpoint")
            for path in paths:
                await self.engine.save("checkpoint", str(path))
                await self.engine.step([])

        trio.run(learn)
        return paths


class TorchReference:
    """Torch's scorer in this process, on the CPU: engines on two devices must agree, too."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine = TorchEngine(replace(config, kind="torch", device="cpu"))
        self.submit = self._engine.submit
        self.advance = self._engine.advance
        self.score = self._engine.score

    def load(self, weights: Path) -> None:
        self._engine.load(str(weights))


def generate(
    engine: EngineProcess | FakeProcess | TorchReference,
    tasks: Sequence[GroupTask],
    sampling: Sampling,
) -> list[Group]:
    """These alone, in their order."""
    drawn: Any = engine
    return draw_all(drawn, tasks, sampling)


@dataclass(frozen=True)
class Subject:
    """An engine, what reads its work, and weights for both."""

    config: EngineConfig
    engine: EngineProcess | FakeProcess
    reference: TorchReference | FakeProcess
    policies: list[Path]

    def load(self, version: int) -> None:
        self.engine.drop()
        self.engine.load(self.policies[version])
        self.reference.load(self.policies[version])

    def reasons(self, tasks: Sequence[GroupTask], groups: Sequence[Group]) -> set[Reason]:
        scored = self.reference.score(tasks, groups, SAMPLING)
        return {judge(one.evidence, Limits.fp32()).reason for one in scored}


@pytest.fixture(params=[FAKE, *swept(SUBJECTS, 2)], scope="module")
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("policies")
    engine, _, family = request.param.partition("-")
    if engine == FAKE:
        fake = FakeProcess()
        yield Subject(
            replace(CONFIG, end_tokens=(END,)), fake, fake, fake.write_policies(folder)
        )
        return
    if engine == "vllm" and not VLLM:
        pytest.skip("SHOAL_VLLM does not name a Python that has vllm")
    rule = DrawRule.GUMBEL if Family(family) in GUMBEL else DrawRule.CDF
    shape = SHAPES[Family(family)]
    config = replace(CONFIG, kind=engine, device=there(), shape=shape, draw=rule)
    policies = [write_model(config, seed, folder / str(seed)) for seed in range(POLICIES)]
    with open_engine_process(VLLM if engine == "vllm" else sys.executable, config) as process:
        yield Subject(config, process, TorchReference(config), policies)


def there() -> str:
    """The device that engines compute on; skips where this machine has none of that name."""
    try:
        find_device(DEVICE)
    except ConfigError as error:
        pytest.skip(f"SHOAL_DEVICE={DEVICE}: {error}")
    return DEVICE


def write_model(config: EngineConfig, seed: int, folder: Path) -> Path:
    """Policies of neighbouring seeds are a step of training apart."""
    model = TransformerModel(config.shape)
    model.initialise(0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # with a tied head a larger factor repeats the last token for ever
        model.lm_head.weight.mul_(5.0 if config.shape.tied else 20.0)
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
            weight.add_(4e-4 * torch.randn(weight.shape, generator=generator))
    folder.mkdir()
    weights = {
        name: RawTensor("F32", tuple(weight.shape), weight.detach().numpy().tobytes())
        for name, weight in model.named_parameters()
    }
    (folder / "model.safetensors").write_bytes(safetensors.encode(weights))
    (folder / "config.json").write_text(FOREIGN)
    return folder


def test_at_first_there_are_no_weights(subject: Subject) -> None:
    """Must be the first of these tests: they share an engine."""
    if isinstance(subject.engine, FakeProcess):
        subject = replace(subject, engine=FakeProcess())  # it has opened its policy to write it
    with pytest.raises(EngineError, match="no weights were loaded"):
        generate(subject.engine, make_tasks(1), SAMPLING)


def test_a_folder_and_its_one_file_are_the_same_policy(subject: Subject) -> None:
    if isinstance(subject.engine, FakeProcess):
        pytest.skip("a fake policy is one file")
    subject.load(2)
    folder = generate(subject.engine, make_tasks(2), SAMPLING)
    subject.load(0)
    subject.engine.load(subject.policies[2] / "model.safetensors")
    assert generate(subject.engine, make_tasks(2), SAMPLING) == folder


def tokens_of(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    return [one.tokens for group in groups for one in group.completions]


def test_groups_have_the_shape_of_the_run(subject: Subject) -> None:
    subject.load(0)
    tasks = make_tasks(16)
    groups = generate(subject.engine, tasks, SAMPLING)
    assert [one.group for one in groups] == [task.group for task in tasks]
    shape = Shape(
        group_size=SAMPLING.group_size,
        max_new_tokens=SAMPLING.max_new_tokens,
        vocabulary=subject.config.shape.vocabulary,
        end_tokens=frozenset(subject.config.end_tokens),
    )
    for group in groups:
        tokens = [one.tokens for one in group.completions]
        assert check_shape(tokens, shape).verdict is Verdict.ACCEPTED
        for one in group.completions:
            assert len(one.logprobs) == len(one.tokens)
            assert max(one.logprobs) <= 0.0


def test_each_end_token_ends_and_nothing_else_does(subject: Subject) -> None:
    subject.load(0)
    found = tokens_of(generate(subject.engine, make_tasks(16), SAMPLING))
    ends = {tokens[-1] for tokens in found if len(tokens) < SAMPLING.max_new_tokens}
    assert ends == set(subject.config.end_tokens)


def test_a_group_is_the_same_alone_and_among_others_that_come_and_go(subject: Subject) -> None:
    """A completion follows from its seed, not from its neighbours."""
    subject.load(0)
    tasks, engine = make_tasks(14), subject.engine
    alone = {task.group: generate(engine, [task], SAMPLING)[0] for task in tasks}
    rng, waiting, mixed, beside = random.Random(1), tasks[::-1], list[Group](), 0
    open_groups = 0
    while waiting or open_groups:
        new = [waiting.pop() for _ in range(min(len(waiting), rng.choice((0, 1, 3))))]
        engine.submit(new, SAMPLING)
        beside += bool(new) and open_groups > 0
        ended = engine.advance(0.0)  # one token of each
        open_groups += len(new) - len(ended)
        mixed += ended
    assert beside >= 3 or isinstance(engine, FakeProcess)
    assert sorted(one.group for one in mixed) == sorted(alone)
    for group in mixed:
        assert tokens_of([group]) == tokens_of([alone[group.group]])
    in_order = sorted(mixed, key=lambda one: one.group)
    assert subject.reasons(tasks, in_order) == {Reason.WITHIN_LIMITS}


def test_what_is_under_way_is_dropped_or_drawn_before_another_policy(subject: Subject) -> None:
    subject.load(0)
    tasks, engine = make_tasks(4), subject.engine
    honest = generate(engine, tasks, SAMPLING)
    engine.submit(tasks, SAMPLING)
    ended = [] if isinstance(engine, FakeProcess) else engine.advance(0.0)
    with pytest.raises(EngineError, match="under way, and would be written by two policies"):
        engine.load(subject.policies[1])
    while len(ended) < len(tasks):
        ended += engine.advance(0.0)
    assert tokens_of(sorted(ended, key=lambda one: one.group)) == tokens_of(honest)
    engine.submit(tasks, SAMPLING)
    if not isinstance(engine, FakeProcess):
        engine.advance(0.0)
    engine.drop()
    assert engine.advance(0.0) == []
    subject.load(1)
    assert subject.reasons(tasks, generate(engine, tasks, SAMPLING)) == {Reason.WITHIN_LIMITS}


def test_a_group_is_drawn_once_at_a_time(subject: Subject) -> None:
    subject.load(0)
    tasks, engine = make_tasks(4), subject.engine
    engine.submit(tasks[:2], SAMPLING)
    for again in (tasks[1:3], [tasks[3], tasks[3]]):
        with pytest.raises(EngineError, match="is under way: it is drawn once at a time"):
            engine.submit(again, SAMPLING)
    if not isinstance(engine, FakeProcess):
        with pytest.raises(EngineError, match=r"none by Sampling\(temperature=0\.5"):
            engine.submit(tasks[2:], replace(SAMPLING, temperature=0.5))
    engine.drop()
    assert len(generate(engine, tasks, replace(SAMPLING, temperature=0.5))) == len(tasks)


def test_there_is_room_until_all_rows_are_taken(subject: Subject) -> None:
    subject.load(0)
    engine = subject.engine
    assert engine.has_room
    is_torch = subject.config.kind == "torch" and not isinstance(engine, FakeProcess)
    rows = ROWS * (at_once(find_device(DEVICE)) if is_torch else 1)
    groups = rows // SAMPLING.group_size
    engine.submit(make_tasks(groups), SAMPLING)
    assert not engine.has_room
    drawn, seen = 0, False
    while drawn < groups:
        drawn += len(engine.advance(0.0))
        seen |= engine.has_room and drawn < groups
    assert engine.has_room
    assert seen or isinstance(engine, FakeProcess)


def test_five_policies_in_place_and_none_is_taken_for_another(subject: Subject) -> None:
    tasks = make_tasks(6)
    first: list[tuple[int, ...]] = []
    before: list[Group] = []
    for version in (*range(POLICIES), 0):
        subject.load(version)
        groups = generate(subject.engine, tasks, SAMPLING)
        assert subject.reasons(tasks, groups) == {Reason.WITHIN_LIMITS}
        if before:
            assert Reason.WITHIN_LIMITS not in subject.reasons(tasks, before)
        first, before = first or tokens_of(groups), groups
    assert tokens_of(before) == first


def test_other_seeds_and_greedy_tokens_are_rejected(subject: Subject) -> None:
    subject.load(0)
    tasks = make_tasks(12)
    others = generate(subject.engine, make_tasks(12, salt="better"), SAMPLING)
    greedy = generate(subject.engine, tasks, replace(SAMPLING, temperature=0.0))
    honest = generate(subject.engine, tasks, SAMPLING)
    for groups in (others, greedy):
        changed = [
            (task, theirs)
            for task, theirs, mine in zip(tasks, groups, honest, strict=True)
            if tokens_of([theirs]) != tokens_of([mine])
        ]
        assert len(changed) > len(tasks) // 2
        reasons = subject.reasons([task for task, _ in changed], [one for _, one in changed])
        assert Reason.WITHIN_LIMITS not in reasons


def test_it_reads_what_the_reference_wrote(subject: Subject) -> None:
    subject.load(1)
    tasks = make_tasks(8)
    groups = generate(subject.reference, tasks, SAMPLING)
    forged = [
        replace(one, completions=(*one.completions[1:], one.completions[0])) for one in groups
    ]
    for claimed, accepted in ((groups, True), (forged, False)):
        scored = subject.engine.score(tasks, claimed, SAMPLING)
        verdicts = {judge(one.evidence, Limits.fp32()).verdict for one in scored}
        assert verdicts == {Verdict.ACCEPTED if accepted else Verdict.REJECTED}
        assert [one.evidence.tokens for one in scored] == [
            sum(map(len, tokens_of([group]))) for group in claimed
        ]


def test_a_prompt_that_leaves_too_little_of_the_context_is_refused(subject: Subject) -> None:
    if isinstance(subject.engine, FakeProcess):
        pytest.skip("a fake policy reads no prompt")
    subject.load(0)
    longest = subject.config.context - SAMPLING.max_new_tokens
    (task,) = make_tasks(1)
    fits, exceeds = (replace(task, prompt=(9,) * count) for count in (longest, longest + 1))
    (group,) = generate(subject.engine, [fits], SAMPLING)
    assert subject.reasons([fits], [group]) == {Reason.WITHIN_LIMITS}
    for call in (
        lambda: generate(subject.engine, [exceeds], SAMPLING),
        lambda: subject.engine.score([exceeds], [group], SAMPLING),
    ):
        with pytest.raises(EngineError, match="exceed the context of 64: lower"):
            call()


def test_weights_that_do_not_fit_change_nothing(subject: Subject, tmp_path: Path) -> None:
    if isinstance(subject.engine, FakeProcess):
        pytest.skip("a fake policy has no shape")
    subject.load(0)
    before = generate(subject.engine, make_tasks(2), SAMPLING)
    other = replace(subject.config, shape=replace(subject.config.shape, feed_forward=64))
    with pytest.raises(EngineError, match=r"No such file|there are no weights at"):
        subject.engine.load(tmp_path / "nothing.safetensors")
    with pytest.raises(EngineError, match=r"mlp\.\w+_proj\.weight"):
        subject.engine.load(write_model(other, 0, tmp_path / "other"))
    subject.load(0)
    assert tokens_of(generate(subject.engine, make_tasks(2), SAMPLING)) == tokens_of(before)


def test_weights_that_are_no_numbers_are_refused(subject: Subject, tmp_path: Path) -> None:
    if isinstance(subject.engine, FakeProcess):
        pytest.skip("a fake policy has no numbers")
    path = write_model(subject.config, 0, tmp_path / "broken") / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = b"\xff\xff\xff\x7f"  # the last weight of the last tensor
    path.write_bytes(data)
    with pytest.raises(EngineError, match="weight holds NaN or infinity"):
        subject.engine.load(path)
    subject.load(0)
    groups = generate(subject.engine, make_tasks(2), SAMPLING)
    assert subject.reasons(make_tasks(2), groups) == {Reason.WITHIN_LIMITS}


@pytest.mark.skipif(not VLLM, reason="SHOAL_VLLM does not name a Python that has vllm")
def test_workers_that_share_each_weight_draw_the_same(tmp_path: Path) -> None:
    """Tensor parallelism: two processes beside the engine's, each with half of the heads."""
    options = replace(CONFIG.vllm, tensor_parallel=2)
    config = replace(CONFIG, kind="vllm", draw=DrawRule.GUMBEL, vllm=options)
    policies = [write_model(config, seed, tmp_path / str(seed)) for seed in range(2)]
    with open_engine_process(VLLM, config) as process:
        subject = Subject(config, process, TorchReference(config), policies)
        for version in (0, 1):
            subject.load(version)
            tasks = make_tasks(4)
            groups = generate(subject.engine, tasks, SAMPLING)
            assert subject.reasons(tasks, groups) == {Reason.WITHIN_LIMITS}
            (scored, *_) = subject.engine.score(tasks, groups, SAMPLING)
            assert judge(scored.evidence, Limits.fp32()).reason is Reason.WITHIN_LIMITS


def test_the_engine_computes_where_it_was_told_to(subject: Subject) -> None:
    if isinstance(subject.engine, FakeProcess):
        pytest.skip("a fake engine computes nowhere")
    kind, device, *_ = subject.engine.placement
    assert (kind, device.partition(":")[0]) == (subject.config.kind, find_device(DEVICE).type)


def test_the_fake_engine_spends_the_time_of_its_profile(tmp_path: Path) -> None:
    fake = FakeProcess()
    fake.load(fake.write_policies(tmp_path)[0])
    before = fake.world.spent
    found = tokens_of(generate(fake, make_tasks(5), SAMPLING))
    seconds = sum(map(len, found)) / CONFIG.profile.generate_rate
    assert fake.world.spent - before == pytest.approx(seconds)
