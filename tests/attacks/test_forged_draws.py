"""Work that is not what the seeds give, through `GroupReplay`, as any engine's scorer feeds it:
forged tokens, proofs and logits that are not numbers, in blocks of any size."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from math import inf

import numpy as np
import pytest
from numpy.typing import NDArray

from proofs import toploc
from proofs.checks import Evidence, Limits, Reason, Verdict, judge, judge_pool
from proofs.draws import draw
from proofs.sampling import DrawRule, draw_words
from roles.engines.base import Completion, EngineError, Group, GroupTask, Sampling
from roles.engines.replay import GroupReplay, conclude

VOCABULARY, WIDTH, LENGTH, END = 300, 48, 70, 7
SAMPLING = Sampling(temperature=1.0, max_new_tokens=LENGTH, group_size=4)
SEEDS = tuple(sha256(bytes([i])).digest() for i in range(4))
TASK = GroupTask(0, (1, 2, 3), SEEDS)
RULES = pytest.mark.parametrize("rule", [DrawRule.CDF, DrawRule.GUMBEL])


class Model:
    """Hidden states that follow from the text so far, and a head."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.embedding = rng.standard_normal((VOCABULARY, WIDTH), dtype=np.float32)
        self.head = rng.standard_normal((WIDTH, VOCABULARY), dtype=np.float32) / 3

    def states(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        """Those behind each token: a decaying sum of what came before."""
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
def test_another_temperature_and_other_weights_are_found(rule: DrawRule) -> None:
    cool = MODEL.score(MODEL.generate(rule, 0.9), rule)
    assert judge(cool, Limits.fp32()).reason in (Reason.DRAW_DISTANCE, Reason.DRAW_GAP)
    greedy = MODEL.score(MODEL.generate(rule, 0.0), rule)
    assert greedy.off[0] > 10
    other = MODEL.score(Model(1).generate(rule), rule)
    assert judge(other, Limits.fp32()).reason is Reason.EXPONENTS


def test_in_bfloat16_limits_small_gaps_add_up_to_a_rejection() -> None:
    """No token of it is far off; together they are: a forger who stays below the gap that one
    token may have."""
    evidence = replace(
        MODEL.score(HONEST[DrawRule.GUMBEL], DrawRule.GUMBEL), tokens=500, gap_max=0.05
    )
    limits = Limits.bf16()
    forged = replace(evidence, gap_mean=0.0045, off=(15, 0, 0, 0, 0))
    assert judge(forged, limits).verdict is Verdict.ACCEPTED
    assert judge_pool([forged], limits).verdict is Verdict.ACCEPTED
    assert judge_pool([forged] * 8, limits).reason is Reason.DRAW_GAPS
    often = replace(evidence, gap_mean=0.0019, off=(20, 0, 0, 0, 0))
    assert judge_pool([often] * 8, limits).reason is Reason.DRAW_MISMATCHES


@RULES
@pytest.mark.parametrize("spoil", [np.nan, inf])
def test_logits_that_are_not_numbers_accept_nothing(rule: DrawRule, spoil: float) -> None:
    """A model whose sums overflow: whatever is claimed is no evidence for it."""
    evidence = MODEL.score(HONEST[rule], rule, spoil=spoil)
    for limits in (Limits.fp32(), Limits.bf16()):
        assert judge(evidence, limits).verdict is Verdict.REJECTED
        assert judge_pool([evidence] * 16, limits).verdict is Verdict.REJECTED


@pytest.mark.parametrize("token", [-1, 2**32, 2**70])
def test_a_token_that_is_no_token_reaches_no_engine(token: int) -> None:
    group = Group(0, (Completion((1, token)), *HONEST[DrawRule.CDF].completions[1:]))
    with pytest.raises(EngineError, match="outside the vocabulary"):
        GroupReplay(TASK, group, SAMPLING, frozenset({END}))


def test_a_token_outside_the_vocabulary_is_infinitely_far_off() -> None:
    """Should one get through the shape: it is not taken for the token it has as an index."""
    replay = GroupReplay(TASK, HONEST[DrawRule.CDF], SAMPLING, frozenset({END}))
    replay._tokens[3] += VOCABULARY
    logits = np.concatenate(
        [MODEL.states(one.tokens) for one in HONEST[DrawRule.CDF].completions]
    )
    replay.add_logits(logits @ MODEL.head)
    chunks = sum(-(-len(one.tokens) // 32) for one in HONEST[DrawRule.CDF].completions)
    stats = toploc.ToplocStats(chunks, 0, 0.0, 0.0, (0.0,) * chunks)
    evidence = replay.scored(stats).evidence
    assert evidence.draw_distance == inf
    assert evidence.surprise == inf


def test_a_proof_of_another_number_of_values_is_malformed() -> None:
    """A worker that commits to fewer values, or more, than the run prescribes."""
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


def test_a_group_of_which_not_all_was_read_gives_no_evidence() -> None:
    replay = GroupReplay(TASK, HONEST[DrawRule.CDF], SAMPLING, frozenset({END}))
    with pytest.raises(EngineError, match="were scored"):
        replay.scored(toploc.ToplocStats(0, 0, 0.0, 0.0))
