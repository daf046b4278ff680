"""The worker process of a member: what it is asked over the pipe, and what it answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p.errors import ConfigError
from p2p.node.tables import write_table
from roles.chat.command import Turn
from roles.chat.find import find_models
from roles.chat.voice import Manner, Voice
from roles.contract.core.diloco import DilocoTerms, Inner
from roles.diloco import worker
from roles.diloco.core.outer import Arithmetic
from roles.engines.config import EngineConfig, GpuOptions
from tests.model_folders import END, LLAMA, make_folder
from tests.sweeps import swept

pytest.importorskip("torch")

TEXT = "hello world, hello shoal. " * 400
TERMS = DilocoTerms(
    corpora={"words": 1.0}, window=8, sequences=4, inner_steps=20, outer_steps=5, warmup=1,
    held_out=16,
)  # fmt: skip
CONFIG = EngineConfig(shape=LLAMA, environment=None, end_tokens=(END,), threads=0)
"""As a node has it by default: as many threads as cores allow."""
SIZE = LLAMA.parameters
GRID = Arithmetic(TERMS, SIZE).grid


class Opened:
    """A worker that serves within this process, as often as it is begun."""

    def __init__(
        self,
        folder: Path,
        config: EngineConfig = CONFIG,
        text: str = TEXT,
        terms: DilocoTerms = TERMS,
    ) -> None:
        self.folder = folder
        (folder / "words.txt").write_text(text)
        base = make_folder(folder / "model")
        places = {"words": str(folder / "words.txt")}
        self._configuration = (
            write_table(config), write_table(terms), places, str(base), None,
        )  # fmt: skip
        self.begin()

    def begin(self) -> None:
        self.server = worker.InnerServer()
        self.server.configure(*self._configuration)

    def path(self, name: str) -> str:
        return str(self.folder / name)


def test_a_round_from_a_base_with_its_own_tokenizer(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    server, state = one.server, one.path("state-0")
    begun = server.begin(state)
    server.load(state, 0, SIZE, False)
    before = server.loss()
    steps, tokens, _ = server.train(1, 20, 0)
    assert (steps, tokens) == (20, 20 * 4 * 8)
    update, norms = server.encode(one.path("update-1"), 1)
    assert update == server.digests(one.path("update-1"), False)
    assert len(norms) == len(update)
    parts = GRID.cut(Path(one.path("update-1")).read_bytes())
    done, mean = server.sum(0, [parts], [norms], [1.0])
    assert done
    Path(one.path("mean-1")).write_bytes(b"".join(mean))
    after = server.advance(state, one.path("mean-1"), one.path("state-1"), 1)
    assert after == server.digests(one.path("state-1"), True) != begun
    server.load(one.path("state-1"), 0, SIZE, False)
    assert server.loss() < before - 0.1
    begun, said = server.write(4)
    assert begun
    assert isinstance(said, str)
    server.export(one.path("export"))
    voice = Voice(find_models(tmp_path / "export").newest, "cpu")
    assert voice.can_chat
    assert list(voice.say(voice.prompt([Turn("user", "hello")]), Manner(most_tokens=4)))


def test_pieces_that_are_none_are_named(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    server, state = one.server, one.path("state-0")
    server.begin(state)
    server.load(state, 0, SIZE, False)
    server.train(1, 2, 0)
    _, norms = server.encode(one.path("update-1"), 1)
    parts = GRID.cut(Path(one.path("update-1")).read_bytes())
    twice = [norms[0], 2 * norms[1], *norms[2:]]
    assert server.sum(0, [parts, parts], [norms, twice], [0.5, 0.5]) == [False, [1, 1]]
    assert server.sum(2, [parts[2:], parts[2:]], [norms, twice], [0.5, 0.5])[0]
    parts[3] = b"\xc0\x7f" + parts[3][2:]
    Path(one.path("mean-1")).write_bytes(b"".join(parts))
    assert server.advance(state, one.path("mean-1"), one.path("state-1"), 1) == 3
    assert not (tmp_path / "state-1").exists()
    assert server.digests(one.path("mean-1"), True) == []


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer is another model's"):
        Opened(tmp_path, replace(CONFIG, shape=replace(LLAMA, vocabulary=100)))


def test_rewards_are_learnt_from_in_one_process() -> None:
    shared = replace(CONFIG, gpus=GpuOptions(ranks=2))
    with pytest.raises(ConfigError, match="take ranks and offload out"):
        worker.InnerServer().configure(write_table(shared), write_table(TERMS), {}, "", {})


@pytest.mark.parametrize("inner", swept(list(Inner), 1))
def test_two_ranks_learn_what_one_does(tmp_path: Path, inner: Inner) -> None:
    """With three windows a step, of which one has two and the other one."""
    terms = replace(TERMS, inner=inner, sequences=3)
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        config = replace(CONFIG, threads=1, gpus=GpuOptions(ranks=ranks))
        one = Opened(folder, config, terms=terms)
        server, state = one.server, one.path("state-0")
        digests = server.begin(state)
        server.load(state, 0, SIZE, False)
        first = server.train(0, 5, 0)
        _, norms = server.encode(one.path("update-1"), 1)
        assert server.restore(str(folder), 1) == []
        server.load(state, 0, SIZE // 2, False)
        second = server.train(5, 3, 15)
        written = server.write(4)
        server.export(one.path("export"))
        found.append((digests, [*first, *second, server.loss()], norms, written))
        server.close()
    rounding = 3e-2 if inner is Inner.MUON else 1e-3  # Muon's products are of bfloat16
    for mine, theirs in zip(*found, strict=True):
        assert theirs == mine or theirs == pytest.approx(mine, rel=rounding)


@pytest.mark.deep
def test_a_round_begun_again_after_any_of_its_steps_gives_the_same_bits(tmp_path: Path) -> None:
    """Killed with -9 at twenty points: windows, moments and schedule are where they were."""
    one = Opened(tmp_path)
    state = one.path("state-0")
    one.server.begin(state)
    one.server.load(state, 0, SIZE, False)
    one.server.train(0, 20, 0)
    one.server.encode(one.path("update-1"), 1)
    expected: list[Any] = []
    for done in range(-1, 20):
        one.begin()
        for steps in [20] if done < 0 else [done, 20]:
            assert one.server.restore(str(tmp_path), 1) == []
            one.server.load(state, 0, SIZE, False)
            one.server.train(20, steps, 80)  # of the round after, on the windows behind
        found = one.server.encode(one.path("update-2"), 2)
        expected = expected or found
        assert found == expected, done
        (tmp_path / "moments-2").unlink()
    assert all(norm > 0 for norm in expected[1])
