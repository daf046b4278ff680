"""The files of a base on a node's disk: kept once, from the first policy that has them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from p2p.errors import ConfigError
from p2p.identity import KeyPair
from p2p.machine import RealWorld
from roles.contract.core.pin import FilePin
from roles.protocol.model_files import FOLDER, MAX_SMALL, check_base, keep_model_files

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": 1}',
    "model.safetensors": b"weights of the base",
}


def pin(name: str, data: bytes) -> FilePin:
    return FilePin(name=name, size=len(data), digest=hashlib.sha256(data).digest())


def run_with(base: tuple[FilePin, ...]) -> Any:
    return SimpleNamespace(
        terms=SimpleNamespace(carried=base, model=SimpleNamespace(base=base))
    )


RUN = run_with(tuple(pin(name, data) for name, data in FILES.items()))


class Policies:
    """Versions 0, 1, 2 ... at ``store/N``, one more with each wait."""

    def __init__(self) -> None:
        self.waits: list[int] = []

    async def wait_policy(self, at_least: int) -> int:
        await trio.lowlevel.checkpoint()
        self.waits.append(at_least)
        return at_least

    @contextmanager
    def pin(self, version: int) -> Iterator[str]:
        yield f"store/{version}"


@pytest.fixture
def node(tmp_path: Path) -> Any:
    return SimpleNamespace(world=RealWorld(KeyPair(b"k" * 32), tmp_path), shardcast=Policies())


async def lay(node: Any, folder: str, **changed: bytes) -> None:
    for name, data in FILES.items():
        key = name.partition(".")[0]
        await node.world.disk.replace(f"{folder}/{name}", changed.get(key, data))


async def test_a_run_without_a_base_keeps_nothing_and_waits_for_nothing(node: Any) -> None:
    assert await keep_model_files(node, run_with(())) is None
    assert node.shardcast.waits == []


async def test_small_files_are_copied_once_and_outlive_their_policy(node: Any) -> None:
    await lay(node, "store/0")
    assert await keep_model_files(node, RUN) == FOLDER
    assert await node.world.disk.list(FOLDER) == ["config.json", "tokenizer.json"]
    await node.world.disk.remove("store/0")
    assert await keep_model_files(node, RUN) == FOLDER
    assert node.shardcast.waits == [0], "what is here is not waited for again"


async def test_a_file_that_is_not_as_pinned_is_taken_from_a_later_policy(
    node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that publishes another tokenizer would make all prompts others."""
    await lay(node, "store/0", tokenizer=b'{"model": 2}')
    await lay(node, "store/1")
    with caplog.at_level(logging.WARNING):
        assert await keep_model_files(node, RUN) == FOLDER
    assert node.shardcast.waits == [0, 1]
    assert "tokenizer.json is not as the run pins it" in caplog.text
    assert await node.world.disk.read(f"{FOLDER}/tokenizer.json") == FILES["tokenizer.json"]


async def test_a_kept_file_that_has_rotted_is_copied_again(node: Any) -> None:
    await lay(node, "store/0")
    await keep_model_files(node, RUN)
    await node.world.disk.replace(f"{FOLDER}/config.json", b"[]")
    await keep_model_files(node, RUN)
    assert await node.world.disk.read(f"{FOLDER}/config.json") == FILES["config.json"]


async def test_what_another_edition_pinned_does_not_stay(node: Any) -> None:
    """Its template came before the one of this edition, on the nodes that were there before."""
    await lay(node, "store/0")
    for name in ("chat_template.jinja", "special_tokens_map.json"):
        await node.world.disk.replace(f"{FOLDER}/{name}", b"older")
    await keep_model_files(node, RUN)
    assert await node.world.disk.list(FOLDER) == ["config.json", "tokenizer.json"]


async def test_a_file_too_large_to_keep_is_named(node: Any) -> None:
    large = FilePin(name="tokenizer.json", size=MAX_SMALL + 1, digest=bytes(32))
    with pytest.raises(ConfigError, match=r"bytes of tokenizer\.json, over the"):
        await keep_model_files(node, run_with((large,)))


async def test_a_trainer_wants_the_whole_base_and_no_other_part_of_a_model(node: Any) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing, or not the file"):
        await check_base(node.world, RUN)
    await lay(node, FOLDER)
    await check_base(node.world, RUN)
    for name in ("LICENSE", "README.md", "pytorch_model.bin"):
        await node.world.disk.replace(f"{FOLDER}/{name}", b"not part of the model")
    await check_base(node.world, RUN)
    for name in ("chat_template.jinja", "other.safetensors"):
        await node.world.disk.replace(f"{FOLDER}/{name}", b"would be part of it")
    both = r"holds 'chat_template\.jinja, other\.safetensors', which the run does not pin"
    with pytest.raises(ConfigError, match=both):
        await check_base(node.world, RUN)
    await lay(node, FOLDER, model=b"weights of another")
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing, or not the file"):
        await check_base(node.world, RUN)
