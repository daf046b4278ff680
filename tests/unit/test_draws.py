"""Draws that replay exactly, cheats that do not, and sums that do not depend on blocks."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from math import inf

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from proofs import toploc
from proofs.checks import LADDER, LARGEST, Evidence, Limits, Reason, Verdict, judge, judge_pool
from proofs.draws import DrawStatistics, Replay, draw, replay
from proofs.sampling import DrawRule, Words, draw_words, gumbel, noise_bits, uniforms
from roles.engines.base import Completion, EngineError, Group, GroupTask, Sampling
from roles.engines.replay import GroupReplay, conclude

CDF, GUMBEL = DrawRule.CDF, DrawRule.GUMBEL
RULES = pytest.mark.parametrize("rule", [CDF, GUMBEL])


def scores(rows: int, seed: int = 0, vocabulary: int = 50) -> NDArray[np.float32]:
    return 3 * np.random.default_rng(seed).standard_normal((rows, vocabulary), dtype=np.float32)


def words_of(rows: int, seed: int = 0) -> Words:
    return draw_words([sha256(seed.to_bytes(8, "big")).digest()], 0, rows).reshape(-1)


def words_for(*u: float) -> Words:
    return np.array([int(one * 2**53) << 11 for one in u], dtype=np.uint64)


def exactly(
    logits: NDArray[np.floating],
    tokens: NDArray[np.integer],
    words: Words,
    temperature: float,
    rule: DrawRule,
) -> Replay:
    """The definition, in float64 and with all tokens at once: what blocks must amount to."""
    rows = np.arange(len(logits))
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    scaled -= scaled.max(axis=1, keepdims=True)
    logs = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    p = np.exp(logs)
    distance, gap = np.zeros((2, len(logits)))
    if temperature == 0:
        best = scaled.argmax(axis=1)
        off = (p[rows, best] - p[rows, tokens], scaled[rows, best] - scaled[rows, tokens])
        distance, gap = (off[0], gap) if rule is CDF else (distance, off[1])
    elif rule is CDF:
        ends, u = np.cumsum(p, axis=1), uniforms(words)
        best = (ends > u[:, None]).argmax(axis=1)
        lower = ends[rows, tokens] - p[rows, tokens]
        distance = np.maximum(np.maximum(lower - u, u - ends[rows, tokens]), 0.0)
    else:
        race = scaled + gumbel(noise_bits(words, np.arange(logits.shape[1])))
        best = race.argmax(axis=1)
        gap = race[rows, best] - race[rows, tokens]
    surprisal = np.where(p > 0, -logs, 0.0)
    entropy = (p * surprisal).sum(axis=1)
    variance = (p * surprisal**2).sum(axis=1) - entropy**2
    return Replay(best != tokens, distance, gap, logs[rows, tokens], entropy, variance)


# Draws


def test_gumbel_by_hand() -> None:
    """The vector of docs/protocols/sampling.md."""
    word = np.array([0x0123456789ABCDEF], dtype=np.uint64)
    noise = gumbel(noise_bits(word, np.arange(4)))[0]
    assert noise.tolist() == pytest.approx(
        [0.03555293532545646, -0.4300434624272235, 1.287881347982189, 0.9220300965960482],
        abs=1e-9,
    )
    logits = np.array([[0.0, 1.0, 0.5, -1.0]])
    for temperature in (1.0, 0.5):
        scores = logits[0] / temperature + noise
        (token,) = draw(logits, word, temperature, GUMBEL).tokens
        assert token == scores.argmax()
        seen = replay(logits, [3], word, temperature, GUMBEL)
        assert seen.gap[0] == pytest.approx(scores.max() - scores[3])
    assert replay(logits, [3], word, 0.0, GUMBEL).gap[0] == pytest.approx(2.0)


@RULES
def test_impossible_tokens_are_never_drawn(rule: DrawRule) -> None:
    """Nor is a token outside the vocabulary taken for the one that it has as an index."""
    logits = np.array([[-inf, 0.0, -inf, 0.0, -inf]] * 4)
    words = words_for(0.0, 0.49, 0.5, 1 - 2**-53)
    assert set(draw(logits, words, 1.0, rule).tokens.tolist()) <= {1, 3}
    assert draw(logits, words, 1.0).tokens.tolist() == [1, 1, 3, 3]
    seen = replay(logits, [0] * 4, words, 1.0, rule)
    assert seen.mismatch.all()
    assert (seen.logprob == -inf).all()
    assert rule is CDF or (seen.gap == inf).all()
    seen = replay(logits, [6, -4, 8, -2], words, 1.0, rule)
    assert seen.mismatch.all()
    assert ((seen.distance if rule is CDF else seen.gap) == inf).all()


@RULES
@pytest.mark.parametrize("bad", [np.nan, inf])
def test_no_distribution_no_draw(bad: float, rule: DrawRule) -> None:
    with pytest.raises(ValueError, match="logits"):
        draw(np.array([[0.0, bad]]), words_for(0.5), 1.0, rule)


@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.3]),
    st.sampled_from([0.0, 1.0, 30.0]),
    st.sampled_from([2, 50, 128, 300]),
    st.sampled_from([CDF, GUMBEL]),
)
def test_honest_draws_replay_exactly(
    seed: int, temperature: float, scale: float, vocabulary: int, rule: DrawRule
) -> None:
    logits = scores(40, seed, vocabulary) * np.float32(scale)
    words = words_of(40, seed)
    drawn = draw(logits, words, temperature, rule)
    result = replay(logits, drawn.tokens.tolist(), words, temperature, rule)
    assert result.distance.max() == result.gap.max() == 0
    assert not result.mismatch.any()
    assert (result.logprob == drawn.logprobs).all()
    assert (result.logprob <= 0).all()


@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.7, 1.0, 1.3]),
    st.sampled_from([2, 50, 129, 5000]),
    st.sampled_from([CDF, GUMBEL]),
)
def test_replay_is_the_definition_but_for_float32(
    seed: int, temperature: float, vocabulary: int, rule: DrawRule
) -> None:
    rng = np.random.default_rng(seed)
    logits, words = scores(20, seed, vocabulary), words_of(20, seed)
    tokens = np.where(
        rng.random(20) < 0.5,
        draw(logits, words, temperature, rule).tokens,
        rng.integers(0, vocabulary, 20),
    )
    fast = replay(logits, tokens, words, temperature, rule)
    exact = exactly(logits, tokens, words, temperature, rule)
    assert (fast.mismatch == exact.mismatch).all()
    assert np.abs(fast.distance - exact.distance).max() < 2e-7
    assert np.abs(fast.gap - exact.gap).max() < 1e-9
    assert np.abs(fast.logprob - exact.logprob).max() < 1e-6
    assert np.abs(fast.entropy - exact.entropy).max() < 1e-5
    assert np.abs(fast.variance - exact.variance).max() < 1e-4


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.sampled_from([CDF, GUMBEL]),
)
def test_blocks_amount_to_the_whole(seed: int, sizes: list[int], rule: DrawRule) -> None:
    count = sum(sizes)
    logits, words = scores(count, seed), words_of(count, seed)
    tokens = np.random.default_rng(seed).integers(0, 50, count)
    whole, parts = DrawStatistics(1.0, rule), DrawStatistics(1.0, rule)
    together = whole.add(logits, tokens, words)
    apart = []
    start = 0
    for size in sizes:
        at = slice(start, start + size)
        apart.append(parts.add(logits[at], tokens[at], words[at]))
        start += size
    assert np.allclose(np.concatenate(apart), together, rtol=0, atol=1e-6)
    seen = replay(logits, tokens, words, 1.0, rule)
    off = seen.distance if rule is DrawRule.CDF else seen.gap
    assert (
        (parts.tokens, parts.off[1:])
        == (whole.tokens, whole.off[1:])
        == (count, tuple(int((off > step).sum()) for step in LADDER[1:]))
    )
    assert parts.largest == pytest.approx(whole.largest, abs=1e-7)
    assert parts.largest == pytest.approx(
        np.sort(off[off > LADDER[0]])[::-1][:LARGEST], abs=1e-7
    )
    assert parts.distance == pytest.approx(whole.distance, abs=1e-7)
    assert parts.gap_max == pytest.approx(whole.gap_max, abs=1e-9)
    assert parts.gap_mean == pytest.approx(whole.gap_mean, abs=1e-9)
    assert parts.surprise == pytest.approx(whole.surprise, abs=1e-4)


@RULES
@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_draws_follow_the_distribution(rule: DrawRule, temperature: float) -> None:
    row = scores(1, vocabulary=6)
    words = words_of(20_000)
    drawn = draw(np.repeat(row, words.size, axis=0), words, temperature, rule)
    counts = np.bincount(drawn.tokens, minlength=6)
    weights = np.exp((row[0] / temperature).astype(np.float64))
    expected = words.size * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 35  # 5 degrees: p = 1e-6


def test_near_numerics_are_near() -> None:
    """A token that noise turns into another is off by less than the first step."""
    logits, words = scores(4000, vocabulary=500), words_of(4000)
    tokens = draw(logits, words, 1.0).tokens
    near = logits + np.float32(3e-6) * scores(4000, seed=1, vocabulary=500)
    seen = replay(near, tokens, words, 1.0)
    assert 0 < seen.distance.max() < LADDER[0]
    assert seen.mismatch.any()
    statistics = DrawStatistics(1.0, CDF)
    statistics.add(near, tokens, words)
    assert (sum(statistics.off), statistics.largest) == (0, ())
    by_noise = draw(logits, words, 1.0, GUMBEL).tokens
    assert replay(near, by_noise, words, 1.0, GUMBEL).gap.max() < 1e-4


def surprise_of(
    logits: NDArray[np.floating], tokens: NDArray[np.integer], temperature: float = 1.0
) -> float:
    statistics = DrawStatistics(temperature)
    statistics.add(logits, tokens, words_of(len(logits)))
    return statistics.surprise


def test_surprise_of_honest_greedy_and_foreign_tokens() -> None:
    logits, words = scores(400), words_of(400)
    assert abs(surprise_of(logits, draw(logits, words, 1.0).tokens)) < 4
    foreign = draw(scores(400, seed=5), words, 1.0).tokens
    assert surprise_of(logits, foreign) > 20
    greedy = draw(logits, words, 0.0).tokens
    assert surprise_of(logits, greedy) < -4
    assert surprise_of(logits, greedy, 0.0) == 0
    sure, tokens = np.array([[0.0, -14.0]] * 100), np.zeros(100, dtype=np.int64)
    tokens[50] = 1
    assert 4 < surprise_of(sure, tokens) < 10, "one unlikely token of a sure policy is no crime"
    tokens[51] = 1
    assert surprise_of(sure, tokens) > 10


# Forged work


VOCABULARY, WIDTH, LENGTH, END = 300, 48, 70, 7
SAMPLING = Sampling(temperature=1.0, max_new_tokens=LENGTH, group_size=4)
SEEDS = tuple(sha256(bytes([i])).digest() for i in range(4))
TASK = GroupTask(0, (1, 2, 3), SEEDS)


class Model:
    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.embedding = rng.standard_normal((VOCABULARY, WIDTH), dtype=np.float32)
        self.head = rng.standard_normal((WIDTH, VOCABULARY), dtype=np.float32) / 3

    def states(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        rows, state = [], self.embedding[list(TASK.prompt)].sum(axis=0)
        for token in tokens:
            rows.append(state)
            state = np.float32(0.7) * state + self.embedding[token]
        return np.array(rows, dtype=np.float32)

    def generate(self, rule: DrawRule, temperature: float = 1.0) -> Group:
        completions = []
        for seed in SEEDS:
            tokens: tuple[int, ...] = ()
            for word in draw_words([seed], 0, LENGTH)[0]:
                logits = self.states((*tokens, 0))[-1:] @ self.head
                drawn = draw(logits, np.array([word]), temperature, rule).tokens
                tokens = (*tokens, int(drawn[0]))
                if tokens[-1] == END:
                    break
            completions.append(self.proven(tokens))
        return Group(0, tuple(completions))

    def proven(self, tokens: tuple[int, ...]) -> Completion:
        (proof,) = toploc.commit([self.states(tokens)], SAMPLING.proof_values)
        return Completion(tokens, proof=proof)

    def score(
        self, group: Group, rule: DrawRule, *, block: int = 13, spoil: float = 0
    ) -> Evidence:
        replay = GroupReplay(TASK, group, SAMPLING, frozenset({END}), rule)
        states = [self.states(one.tokens) for one in group.completions]
        for values, rows in zip(replay.activations, states, strict=True):
            for start in range(0, len(rows), block):
                values.add(rows[start : start + block])
        logits = np.concatenate(states) @ self.head
        if spoil:
            logits[5, 5] = spoil
        for start in range(0, len(logits), block):
            replay.add_logits(logits[start : start + block])
        (scored,) = conclude([replay], SAMPLING.proof_values)
        assert len(scored.logprobs) == 2 * len(logits)
        return scored.evidence


MODEL = Model()
HONEST = {rule: MODEL.generate(rule) for rule in DrawRule}


@RULES
def test_honest_work_passes_in_blocks_of_any_size(rule: DrawRule) -> None:
    for block in (1, 13, 1000):
        evidence = MODEL.score(HONEST[rule], rule, block=block)
        assert judge(evidence, Limits.fp32()).verdict is Verdict.ACCEPTED
        assert (evidence.draw_distance, evidence.gap_max, sum(evidence.off)) == (0, 0, 0)


@RULES
def test_a_token_that_the_seed_does_not_give_is_found_though_its_proof_is_right(
    rule: DrawRule,
) -> None:
    first, *others = HONEST[rule].completions
    for token in (0, VOCABULARY - 1):
        edited = MODEL.proven((*first.tokens[:20], token, *first.tokens[21:]))
        evidence = MODEL.score(Group(0, (edited, *others)), rule)
        assert judge(evidence, Limits.fp32()).reason in (Reason.DRAW_DISTANCE, Reason.DRAW_GAP)
        assert evidence.off[0] >= 1
        assert (evidence.exponent_mismatches, evidence.mantissa_mean) == (0, 0.0)


@RULES
@pytest.mark.parametrize("spoil", [np.nan, inf])
def test_logits_that_are_not_numbers_accept_nothing(rule: DrawRule, spoil: float) -> None:
    """A model whose sums overflow: whatever is claimed is no evidence for it."""
    evidence = MODEL.score(HONEST[rule], rule, spoil=spoil)
    for limits in (Limits.fp32(), Limits.bf16()):
        assert judge(evidence, limits).verdict is Verdict.REJECTED
        assert judge_pool([evidence] * 16, limits).verdict is Verdict.REJECTED


def test_a_group_that_is_not_of_tokens_or_not_read_as_a_whole_gives_no_evidence() -> None:
    honest = HONEST[DrawRule.CDF]
    for token in (-1, 2**32, 2**70):
        group = Group(0, (Completion((1, token)), *honest.completions[1:]))
        with pytest.raises(EngineError, match="outside the vocabulary"):
            GroupReplay(TASK, group, SAMPLING, frozenset({END}))
    replay = GroupReplay(TASK, honest, SAMPLING, frozenset({END}))
    with pytest.raises(EngineError, match="were scored"):
        replay.scored(toploc.ToplocStats(0, 0, 0.0, 0.0))


def test_a_proof_of_another_number_of_values_is_malformed() -> None:
    group = HONEST[DrawRule.CDF]
    first, *others = group.completions
    for values in (8, SAMPLING.proof_values - 1, SAMPLING.proof_values + 1, 128):
        (proof,) = toploc.commit([MODEL.states(first.tokens)], values)
        forged = Group(0, (replace(first, proof=proof), *others))
        evidence = MODEL.score(forged, DrawRule.CDF)
        assert judge(evidence, Limits.bf16()).reason is Reason.MALFORMED_PROOF


def test_proofs_of_two_completions_are_not_exchanged() -> None:
    first, second, *others = HONEST[DrawRule.CDF].completions
    length = min(len(first.tokens), len(second.tokens))
    one, two = MODEL.proven(first.tokens[:length]), MODEL.proven(second.tokens[:length])
    swapped = (replace(one, proof=two.proof), replace(two, proof=one.proof), *others)
    evidence = MODEL.score(Group(0, swapped), DrawRule.CDF)
    assert judge(evidence, Limits.fp32()).reason is Reason.EXPONENTS
