"""Versions that travel as low-rank sums of the weights that a run began with."""

from __future__ import annotations

import json
import struct
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import trio

from p2p.errors import BadMessage, LocalProtocolError
from p2p.shardcast import ShardcastConfig
from p2p.shardcast.adapter import (
    AdapterFile,
    Piece,
    Target,
    merge_run_untrusted,
    read_adapter_untrusted,
)
from p2p.shardcast.codec import ADAPTER, PATCH
from p2p.shardcast.index import Span, digest_of
from p2p.shardcast.layout import Tensor, tensors_untrusted
from p2p.shardcast.patch import SpanRun
from tests.support.shardcast_town import Member, Town, everybody
from tests.unit.test_shardcast_patches import came, v

ROWS, WIDTH, RANK, SCALE = 700, 400, 4, 2.0
TARGETS = ("a.q_proj", "a.v_proj")


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def safetensors(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    header, at = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    data = b"".join(raw for _, _, raw in tensors.values())
    return struct.pack("<Q", len(text)) + text + data


def model(values: dict[str, np.ndarray]) -> bytes:
    made = {
        name + ".weight": ("BF16", (ROWS, WIDTH), one.tobytes()) for name, one in values.items()
    }
    return safetensors(made | {"norm.weight": ("BF16", (WIDTH,), bytes(2 * WIDTH))})


BASE = {
    name: bf16(np.random.default_rng(number).normal(0, 0.02, (ROWS, WIDTH)))
    for number, name in enumerate((*TARGETS, "a.o_proj"))
}


def factors(version: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(100 + version)
    made = {}
    for name in TARGETS:
        made[name + ".lora_A"] = random.normal(0, 0.05, (RANK, WIDTH)).astype("<f4")
        made[name + ".lora_B"] = random.normal(0, 0.02, (ROWS, RANK)).astype("<f4")
    return made


def adapter(found: dict[str, np.ndarray], rank: float = RANK, scale: float = SCALE) -> bytes:
    tensors = {name: ("F32", one.shape, one.tobytes()) for name, one in found.items()}
    terms = np.array([rank, scale], "<f4").tobytes()
    return safetensors(tensors | {"lora": ("F32", (2,), terms)})


def merged(found: dict[str, np.ndarray]) -> bytes:
    """By the definition, and not as it is computed."""
    made = dict(BASE)
    for name in TARGETS:
        down, up = found[name + ".lora_A"], found[name + ".lora_B"]
        total = np.zeros((ROWS, WIDTH), "<f4")
        for one in range(RANK):
            total = total + np.outer(up[:, one], down[one])
        total = total * np.float32(SCALE) + (BASE[name].astype("<u4") << 16).view("<f4")
        made[name] = bf16(total)
    return model(made)


async def publish(trainer: Member, version: int, content: bytes, lora: bytes | None) -> None:
    await trainer.world.disk.write(f"v{version}.safetensors", content)
    if lora is not None:
        await trainer.world.disk.write(f"v{version}.lora", lora)
    given = (f"v{version}.lora", v(0)) if lora is not None else None
    await trainer.shardcast.publish(v(version), f"v{version}.safetensors", adapter=given)


@pytest.fixture
def town(tmp_path: Path) -> Town:
    return Town(tmp_path, ShardcastConfig(roster_interval=0.0, keep_versions=2))


async def test_versions_travel_as_adapters_of_the_first(town: Town) -> None:
    with trio.fail_after(60):
        async with AsyncExitStack() as stack:
            trainer, other = await everybody(town, stack, 2)
            await publish(trainer, 0, model(BASE), None)
            await other.shardcast.wait_policy(v(0))
            for version in range(1, 5):  # the base outlives what is pruned
                found = factors(version)
                before = came(other)
                await publish(trainer, version, merged(found), adapter(found))
                await other.shardcast.wait_policy(v(version))
                path = other.shardcast.weights(v(version))
                assert await other.world.disk.read(path) == merged(found)
                (sent,) = trainer.shardcast.manifest(v(version)).patches
                assert (sent.name, sent.base) == (ADAPTER, 0)
                assert came(other) - before < 1.1 * sent.wire
            assert other.shardcast.held == (4, 3, 0)
            joiner = await stack.enter_async_context(town.member(2))
            await joiner.shardcast.wait_policy(v(4))
            path = joiner.shardcast.weights(v(4))
            assert await joiner.world.disk.read(path) == merged(factors(4))
            before = came(joiner)
            await publish(trainer, 5, merged(factors(5)), adapter(factors(5)))
            await joiner.shardcast.wait_policy(v(5))
            (sent,) = trainer.shardcast.manifest(v(5)).patches
            assert came(joiner) - before < 1.1 * sent.wire


async def test_an_adapter_that_leads_elsewhere_is_not_signed(town: Town) -> None:
    with trio.fail_after(60):
        async with AsyncExitStack() as stack:
            (trainer,) = await everybody(town, stack, 1)
            await publish(trainer, 0, model(BASE), None)
            await publish(trainer, 1, merged(factors(1)), adapter(factors(2)))
            (sent,) = trainer.shardcast.manifest(v(1)).patches
            assert sent.name == PATCH
            unknown = {"b" + name: one for name, one in factors(2).items()}
            with pytest.raises(LocalProtocolError, match="which the model has not"):
                await publish(trainer, 2, merged(factors(2)), adapter(unknown))


async def test_a_lying_trainer_makes_no_version(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it signs leads elsewhere: the digests decide, and the spans come as they are."""
    with trio.fail_after(60):
        async with AsyncExitStack() as stack:
            trainer, other = await everybody(town, stack, 2)
            await publish(trainer, 0, model(BASE), None)
            await other.shardcast.wait_policy(v(0))
            with monkeypatch.context() as lie:

                async def yes(
                    _adapter: object, _base: object, _index: object, run: SpanRun
                ) -> object:
                    return b"", (1 << run.end - run.first) - 1

                lie.setattr(trainer.shardcast._publisher._store, "merge_run", yes)
                await publish(trainer, 1, merged(factors(1)), adapter(factors(2)))
            assert trainer.shardcast.manifest(v(1)).patches[0].name == ADAPTER
            await other.shardcast.wait_policy(v(1))
            path = other.shardcast.weights(v(1))
            assert await other.world.disk.read(path) == merged(factors(1))


def judge(data: bytes) -> None:
    def tensors(content: bytes) -> list:
        length = int.from_bytes(content[:8], "little")
        return tensors_untrusted(content[8 : 8 + length], len(content))

    found = tensors(data)
    terms = b"".join(data[one.start : one.end] for one in found if one.name == "lora")
    read_adapter_untrusted("a", found, terms, [tensors(model(BASE))])


def changed(name: str, value: np.ndarray | None) -> bytes:
    found = factors(1)
    if value is None:
        del found[name]
    else:
        found[name] = value
    return adapter(found)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (adapter(factors(1), rank=5), "another rank or shape"),
        (adapter(factors(1), rank=0), "rank 0"),
        (adapter(factors(1), rank=float("nan")), "rank nan"),
        (adapter(factors(1), rank=float("inf")), "rank inf"),
        (adapter(factors(1), rank=1e9), "rank 1000000000"),
        (adapter(factors(1), scale=float("inf")), "scale inf"),
        (changed("norm.lora_A", np.zeros((RANK, WIDTH), "<f4")), "half of 'norm'"),
        (changed("a.q_proj.lora_B", None), "half of 'a.q_proj'"),
        (changed("b.q_proj.lora_A", np.zeros((RANK, 9), "<f4")), "the model has not"),
        (
            changed("a.q_proj.lora_B", np.zeros((9 * ROWS, RANK), "<f4")),
            "another rank or shape",
        ),
        (safetensors({"x": ("F32", (1,), bytes(4))}), "without 'lora'"),
        (safetensors({"lora": ("F32", (1 << 40,), bytes(8))}), "without 'lora'"),
    ],
)
def test_adapters_of_something_else_are_bad_messages(data: bytes, words: str) -> None:
    judge(adapter(factors(1)))
    with pytest.raises(BadMessage, match=words):
        judge(data)


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 0)])
def test_an_adapter_of_an_empty_matrix_is_a_bad_message(shape: tuple[int, int]) -> None:
    """No row of it is anywhere, and a row without inputs would divide by zero."""
    outputs, inputs = shape
    place = Tensor(8, 8, 4, "a.weight", "F32", shape)
    found = [
        Tensor(0, 8, 4, "lora", "F32", (2,)),
        Tensor(8, 8 + 4 * inputs, 4, "a.lora_A", "F32", (1, inputs)),
        Tensor(8 + 4 * inputs, 8 + 4 * sum(shape), 4, "a.lora_B", "F32", (outputs, 1)),
    ]
    with pytest.raises(BadMessage, match="no matrix"):
        read_adapter_untrusted("a", found, np.ones(2, "<f4").tobytes(), [[place]])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_make_nothing(value: float) -> None:
    old = bytes(2 * 8)
    run, spans = SpanRun(0, 1, 16, 2), [Span(digest_of(old), 16, 2)]
    for down, expected in ((np.zeros(4, "<f4"), 1), (np.full(4, value, "<f4"), 0)):
        factor = Tensor(0, 16, 4, dtype="F32")
        target = Target(0, Tensor(0, 16, 2, dtype="BF16"), factor, factor)
        adapter = AdapterFile("", 1.0, 1, (target,))
        piece = Piece(0, 16, 0, down.tobytes(), bytes(8), target, adapter)
        assert merge_run_untrusted(run, spans, old, [piece])[1] == expected
