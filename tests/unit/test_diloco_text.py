"""What a member learns from, text or rewards, and its inner steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2p.errors import ConfigError
from roles.contract.core.diloco import Codec, DilocoTerms, Goal, Inner, Outer
from roles.contract.core.shape import ModelShape
from roles.diloco import corpus
from roles.diloco.core.messages import NO_DIGEST, Outcome, Plan, Record
from roles.diloco.core.outer import Arithmetic
from roles.diloco.core.quant import Values
from roles.diloco.core.windows import dealt, part_of, windows
from roles.diloco.corpus import Windows, open_corpora
from roles.diloco.material import Rewards, Texts
from roles.engines.base import EngineError
from roles.engines.config import EngineConfig
from roles.envs.base import open_teaching
from roles.envs.mix import EnvironmentPart, EnvironmentSetup, open_mix
from roles.envs.sort import decode, is_held_out
from roles.rl.recipes import SORTER
from tests.support.pieces import exchange
from tests.support.toys import sorting_engine, sorting_learner
from tests.unit.core_swarm import peer_named

TEXT = "def shoal(of: int) -> str:\n    return 'fish' * of\n" * 200


def encode(text: str) -> Sequence[int]:
    return text.encode()


def opened(
    places: dict[str, Path], weights: dict[str, float] | None = None, **changes: Any
) -> Windows:
    options = {"end": 0, "vocabulary": 256, "window": 16, "held_out": 8, **changes}
    paths = {name: str(path) for name, path in places.items()}
    return open_corpora(weights or dict.fromkeys(places, 1.0), paths, encode, **options)


def test_files_lines_and_rows_become_windows(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one.py").write_text(TEXT)
    rows = "\n".join(json.dumps({"text": TEXT[:500]}) for _ in range(10))
    (tmp_path / "a/two.jsonl").write_text(rows)
    (tmp_path / "a/ignored.bin").write_bytes(b"\xff" * 100)
    found = opened({"a": tmp_path / "a"})
    assert found.tokens.size == len(TEXT) + 1 + 10 * 501
    assert found.width == 17
    assert not set(found.starts) & set(found.held_out)
    first = found.read(found.starts[:1])[0]
    assert bytes(first.tolist()).decode() == TEXT[:17]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "is empty"),
        ({"x.txt": b""}, "is empty"),
        ({"x.txt": b"short"}, "at least"),
        ({"x.txt": b"caf\xe9" * 500}, "not UTF-8 text.*byte 3"),
        ({"x.jsonl": b'{"text": "a"}\nnot json\n'}, "line 2"),
        ({"x.jsonl": b'{"words": "a"}\n'}, "line 1"),
    ],
)
def test_a_corpus_that_cannot_be_learnt_from_is_refused_by_name(
    tmp_path: Path, files: dict[str, bytes], said: str
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=said) as error:
        opened({"books": tmp_path})
    assert "books" in str(error.value)


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000, b'{"text": "\\ud800"}', b'{"text": 5}', b'{"text": ["a"]}',
        b'{"text": "a"}{"text": "b"}', b"\x00" * 50, b'{"text": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_lines_from_strangers_are_refused_by_number(tmp_path: Path, line: bytes) -> None:
    """Half of a surrogate pair, and lists in lists without end, were errors of our own."""
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match="line 2 of"):
        opened({"books": tmp_path})


def test_a_text_may_have_every_character(tmp_path: Path) -> None:
    """U+2028 and U+0085 end a line for Python, and not for JSON."""
    text = TEXT[:400] + "\u2028\u0085\x0b\x00\U0001f600"
    row = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / "x.jsonl").write_text("\n".join([row] * 3) + "\n\n", encoding="utf-8")
    assert opened({"a": tmp_path}).tokens.size == 3 * (len(text.encode()) + 1)


def test_a_corpus_that_is_missing_or_beyond_all_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"is not at .*nowhere"):
        opened({"books": tmp_path / "nowhere"})
    with pytest.raises(ConfigError, match=r"\[role.trainer.corpora\]"):
        opened({}, weights={"books": 1.0})
    monkeypatch.setattr(corpus, "MAX_BYTES", 1000)
    (tmp_path / "x.txt").write_bytes(b"\xff" * 1001)  # not even decoded
    with pytest.raises(ConfigError, match="more than"):
        opened({"a": tmp_path})


def test_a_mixture_is_by_weight_and_leaves_no_window_out(tmp_path: Path) -> None:
    for name, times in (("a", 5), ("b", 1)):
        (tmp_path / f"{name}.txt").write_text(times * TEXT)
    found = opened({name: tmp_path / f"{name}.txt" for name in "ab"})
    of_a = int((found.starts < 5 * len(TEXT) + 1).sum())
    assert of_a / found.starts.size == pytest.approx(0.5, abs=0.01)
    windows = (5 * len(TEXT) + 1) // 17 + (len(TEXT) + 1) // 17
    assert len({*found.starts}) == windows - found.held_out.size


def test_while_the_rate_falls_the_annealing_mixture_is_read(tmp_path: Path) -> None:
    """Also of a corpus that comes only then, and in a call that spans the border."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(400 * f"{name * 15}\n")
    terms = DilocoTerms(
        corpora={"a": 1.0}, anneal={"a": 1.0, "b": 3.0}, outer_steps=2, inner_steps=20,
        decay_share=0.25, window=16, held_out=8,
    )  # fmt: skip
    places = {name: tmp_path / f"{name}.txt" for name in "ab"}
    corpus = opened(places, terms.corpora, vocabulary=128, anneal=terms.anneal)
    server = Texts(corpus, EngineConfig(environment=None), terms)
    read = server.batches(0, 20, 20)
    assert len(read) == 20
    of_b = [float((rows == ord("b")).any(1).mean()) for rows in read]
    assert of_b[:10] == [0.0] * 10  # the last ten of forty steps are annealed
    assert np.mean(of_b[10:]) == pytest.approx(0.75, abs=0.15)
    assert not (server.batches(0, 29, 1)[0] == ord("b")).any()
    assert np.array_equal(server.batches(80, 30, 1)[0], read[10])
    with pytest.raises(ValueError, match="corpus"):
        DilocoTerms(anneal={"a": 0.0})


# Who learns from which windows.


@pytest.mark.parametrize("total", [1, 2, 7, 1000, 4097])
def test_a_lap_has_every_window_once_and_the_next_another_order(total: int) -> None:
    first = windows(5, 0, total, total)
    assert sorted(first) == list(range(total))
    if total > 100:
        second = windows(5, total, total, total)
        assert sorted(second) == list(range(total))
        assert (first != second).any()
        assert (first != windows(6, 0, total, total)).any()
        assert np.array_equal(windows(5, 10, 50, total), first[10:60])


def record(step: int, *members: int) -> Record:
    peers = tuple(sorted(peer_named(n) for n in members))
    return Record(0, Outcome(Plan(step, NO_DIGEST, (), peers), NO_DIGEST, NO_DIGEST), ())


def test_parts_of_members_are_disjoint_also_when_members_change() -> None:
    """Each is a function of the records alone: a restarted member goes on where it was."""
    chain = [record(0, 1, 2, 3), record(1, 1, 3), record(2, 1, 3, 4, 5)]
    taken: list[int] = []
    for length in range(1, 4):
        newest = chain[length - 1]
        for member in newest.members:
            first = part_of(newest, member, dealt(chain[:length], 10), 10)
            taken += windows(0, first, 10, 100_000).tolist()
    assert len(taken) == len(set(taken)) == 10 * (3 + 2 + 4)


def test_the_schedule_is_warmup_stable_and_a_square_root_down() -> None:
    """The vectors of PRIME's run: 1,000 up, flat to 74,700, down to 90,400."""
    terms = DilocoTerms(
        outer_steps=904, inner_steps=100, warmup=1000, decay_share=15_700 / 90_400, rate=1.0
    )
    expected = {
        500: 0.5, 74_699: 1.0, 74_700: 1.0, 74_701: 0.9920191311553238, 78_625: 0.5,
        82_550: 0.2928932188134524, 90_400: 0.0,
    }  # fmt: skip
    for step, rate in expected.items():
        assert terms.rate_at(step) == pytest.approx(rate, abs=1e-12)


# Inner steps.

SHAPE = ModelShape(
    vocabulary=32, width=16, layers=1, query_heads=2, key_heads=1, head_width=8,
    feed_forward=32, tied=True,
)  # fmt: skip
TERMS = DilocoTerms(window=8, sequences=4, warmup=1, inner_steps=30, outer_steps=10)


def pretrainer(terms: DilocoTerms = TERMS):  # type: ignore[no-untyped-def]
    pytest.importorskip("torch")
    from roles.diloco.pretrain import Pretrainer

    return Pretrainer(terms, None, None, EngineConfig(shape=SHAPE, environment=None))


def batches(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 31, (count, 4, 1))
    return list((starts + np.arange(9)) % 32)


@pytest.mark.parametrize("inner", list(Inner))
def test_inner_steps_stay_on_their_device(tmp_path: Path, inner: Inner) -> None:
    pytest.importorskip("torch")
    from roles.diloco.pretrain import Pretrainer
    from tests.pretended_device import NamedDevices, PretendedDevice

    terms = replace(TERMS, inner=inner)

    def round_of(device: Any, folder: Path) -> tuple[float, np.ndarray, list[int]]:
        config = EngineConfig(shape=SHAPE, environment=None)
        one = Pretrainer(replace(terms, overlap=True), None, None, config, device)
        one.load(one.vector())
        one.train(batches(5), 1)
        one.save(folder, 1)
        assert one.restore(folder, 1) == []
        one.update()
        one.load(one.vector(), is_ahead=True)
        return one.loss(batches(2)), one.update(), one.continue_text([1, 2], 3, 0)

    (tmp_path / "host").mkdir()
    (tmp_path / "there").mkdir()
    from roles.engines.torch.device import CPU

    with NamedDevices():
        host = round_of(CPU, tmp_path / "host")
    with PretendedDevice() as pretended:
        there = round_of(pretended.DEVICE, tmp_path / "there")
    assert pretended.operations > 100
    assert host[0] == pytest.approx(there[0])
    assert np.allclose(host[1], there[1], atol=1e-6)
    assert host[2] == there[2]


def test_the_inner_optimiser_is_torchs_adamw() -> None:
    torch = pytest.importorskip("torch")
    ours, theirs = pretrainer(), pretrainer()
    parameters = [weight for _, weight in sorted(theirs.model.named_parameters())]
    adam = torch.optim.AdamW(
        parameters, lr=TERMS.rate, betas=TERMS.betas, weight_decay=TERMS.weight_decay
    )
    for number, batch in enumerate(batches(25), 1):
        rows = torch.from_numpy(batch)
        logits = theirs.model.logits(theirs.model(rows[:, :-1]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, TERMS.gradient_norm)
        for group in adam.param_groups:  # without moments the rate climbs for 20 steps
            group["lr"] = TERMS.rate_at(number) * min(1.0, number / 20)
        adam.step()
        adam.zero_grad()
        ours.train([batch], number)
    assert np.allclose(ours.vector(), theirs.vector(), atol=2e-6)


def test_a_round_begins_from_the_outer_weights_and_ends_with_the_difference() -> None:
    one = pretrainer()
    outer = one.vector() + np.float32(0.01)
    one.load(outer)
    one.train(batches(3), 5)
    assert np.array_equal(one.update(), outer - one.vector())
    with pytest.raises(EngineError, match="not the"):
        one.load(outer[:-1])
    outer[0] = np.nan
    with pytest.raises(EngineError, match="no numbers"):
        one.load(outer)


def test_steps_taken_during_an_exchange_are_kept_when_it_ends() -> None:
    """Shifted late application: outer weights as everywhere, and what was learnt since."""
    one = pretrainer(replace(TERMS, overlap=True))
    one.train(batches(3), 5)
    sent = one.vector() + 0
    update = one.update()
    one.train(batches(2), 8)
    ahead = one.vector() - sent
    outer = sent - np.float32(0.5) * update
    one.load(outer, is_ahead=True)
    assert np.allclose(one.vector(), outer + ahead, atol=1e-6)
    assert np.allclose(one.update(), -ahead, atol=1e-6)
    other = pretrainer()
    other.load(outer)
    assert one.loss(batches(2)) == other.loss(batches(2))  # of the outer weights, in both


def test_outside_its_span_a_fragment_keeps_what_was_learnt() -> None:
    """Streaming: a round changes a part of the weights; the rest goes on as it was."""
    one, span = pretrainer(replace(TERMS, overlap=True)), slice(100, 300)
    one.train(batches(3), 5)
    learnt, outer = one.vector(), one.vector() * np.float32(0.5)
    one.load(outer, 100, 300)
    expected = learnt.copy()
    expected[span] = outer[span]
    assert np.array_equal(one.vector(), expected)
    one.update()
    one.train(batches(2), 8)
    ahead = one.vector()
    one.load(outer * np.float32(0.5), 100, 300, is_ahead=True)
    changed = np.flatnonzero(one.vector() != ahead)
    assert 100 <= changed.min() <= changed.max() < 300
    assert np.allclose(ahead[span] - one.vector()[span], outer[span] * 0.5, atol=1e-6)


def test_averaged_gradients_are_those_of_one_machine_with_the_whole_batch() -> None:
    alone = pretrainer()
    terms = replace(TERMS, outer=Outer.PARALLEL, inner_steps=1, outer_steps=300)
    members = [pretrainer(terms) for _ in range(2)]
    arithmetic = Arithmetic(replace(terms, codec=Codec.FP32), members[0].size)
    state = arithmetic.begun(members[0].vector())
    for step, whole in enumerate(batches(40), 1):
        for member, rows in zip(members, np.array_split(whole, 2), strict=True):
            member.load(state[0])
            member.train([rows], step - 1)
        exchange(arithmetic, state, [member.update() for member in members], step)
        alone.train([whole], step - 1)
    assert np.allclose(state[0], alone.vector(), atol=2e-5)


def test_the_optimisers_state_survives_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    one, two = pretrainer(), pretrainer()
    one.train(batches(5), 1)
    one.save(tmp_path, 3)
    two.load(one.vector())
    assert two.restore(tmp_path, 3) == []
    one.train(batches(3), 6)
    two.train(batches(3), 6)
    assert np.array_equal(one.vector(), two.vector())
    one.save(tmp_path, 4)
    data = bytearray((tmp_path / "moments-4").read_bytes())
    data[-1] ^= 1
    (tmp_path / "moments-4").write_bytes(data)
    (damage,) = two.restore(tmp_path, 4)
    assert "damaged" in damage
    one.restore(tmp_path, 3)
    two.load(one.vector())
    one.train(batches(1), 9)
    two.train(batches(1), 9)
    assert np.array_equal(one.vector(), two.vector())
    one.save(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moments-4", "moments-5"]
    assert two.restore(tmp_path / "nothing", 1) == []


# Members that learn from rewards


MEMBERS = 2
REWARD_TERMS = DilocoTerms(
    goal=Goal.REWARD, outer_steps=3, inner_steps=16, sequences=24, rate=1e-3, warmup=0,
    gradient_norm=0.1, held_out=192,
)  # fmt: skip
TAUGHT = sorting_engine(learner=sorting_learner())


def rewards(terms: DilocoTerms = REWARD_TERMS, config: EngineConfig = TAUGHT) -> Rewards:
    environment = open_mix(EnvironmentSetup(parts=(EnvironmentPart(name="sort"),)))
    return Rewards(environment, open_teaching("sort"), config, terms)


def member(terms: DilocoTerms = REWARD_TERMS, config: EngineConfig = TAUGHT):  # type: ignore[no-untyped-def]
    pytest.importorskip("torch")
    from roles.diloco.pretrain import Pretrainer

    found = rewards(terms, config)
    return Pretrainer(terms, None, found, config), found


@pytest.mark.deep
def test_two_members_that_average_what_rewards_taught_them_answer_better() -> None:
    """From the end of a warm-up, with nothing but right and wrong, in three rounds of int4."""
    warm_up = replace(REWARD_TERMS, sequences=1)
    first, examples = member(warm_up, sorting_engine())
    first.train(examples.batches(0, 0, 400), 0)
    members = [member() for _ in range(MEMBERS)]
    arithmetic = Arithmetic(REWARD_TERMS, first.size)
    state = arithmetic.begun(first.vector())
    wrong = [wrong_share(members, state[0])]
    for step in range(REWARD_TERMS.outer_steps):
        for rank, (trainer, material) in enumerate(members):
            trainer.load(state[0])
            window, begin = (step * MEMBERS + rank) * REWARD_TERMS.phase_windows, 16 * step
            steps, tokens, _ = trainer.train(material.batches(window, begin, 16), begin)
            assert steps == 16
            assert tokens == 16 * 24 <= REWARD_TERMS.phase_tokens
        exchange(arithmetic, state, [one.update() for one, _ in members], step + 1)
        wrong.append(wrong_share(members, state[0]))
    assert wrong[-1] < wrong[0] - 0.1, wrong


def wrong_share(members, weights: Values) -> float:  # type: ignore[no-untyped-def]
    trainer, material = members[0]
    trainer.load(weights)
    return float(trainer.loss(material.held_out()))


def test_members_draw_disjoint_questions_that_are_the_same_wherever_they_are_drawn() -> None:
    one, two = rewards(), rewards()
    asked = [batch for rank in range(3) for batch in one.batches(rank * 288, 0, 12)]
    numbers = [question.number for batch in asked for question in batch]
    assert numbers == list(range(3 * 288))
    assert two.batches(288, 0, 12) == one.batches(288, 0, 12)
    assert len({question.seed for batch in asked for question in batch}) == len(numbers)
    group = asked[0][0].group(16)
    assert len(set(group.seeds)) == 16
    assert not any(is_held_out(decode(one.task.prompt)) for batch in asked for one in batch)
    other = rewards(config=replace(TAUGHT, seed=1))
    assert other.batches(0, 0, 1) != one.batches(0, 0, 1)


def test_groups_without_a_spread_of_rewards_leave_the_weights_as_they_are() -> None:
    """Untaught, nothing is right: there is no gradient, and Adam's moments must not drift."""
    trainer, material = member()
    before = trainer.vector()
    _, _, loss = trainer.train(material.batches(0, 0, 2), 0)
    assert loss == 1.0
    assert np.array_equal(trainer.vector(), before)
    parallel = replace(REWARD_TERMS, outer=Outer.PARALLEL, inner_steps=1)
    trainer, material = member(parallel)
    trainer.train(material.batches(0, 0, 1), 0)
    assert not trainer.update().any()


def test_an_environment_with_more_tokens_than_the_model_is_refused() -> None:
    small = replace(TAUGHT, shape=replace(SORTER, vocabulary=49))
    with pytest.raises(ConfigError, match="50 tokens, the model 49"):
        rewards(config=small)
