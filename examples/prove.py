"""A worker proves which model it ran, and that the seeds drew: numpy, and nothing else."""

from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from proofs import DrawRule, Malformed, commit, draw, draw_seed, draw_words, replay, verify

VOCABULARY, WIDTH, TOKENS = 64, 128, 96
RULE, TEMPERATURE = DrawRule.CDF, 1.0


def model(seed: int) -> SimpleNamespace:
    """Weights of a toy: the next token follows from the last one and a running state."""
    rng = np.random.default_rng(seed)
    embed = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    head = rng.standard_normal((WIDTH, VOCABULARY)).astype(np.float32) / 4
    return SimpleNamespace(embed=embed, head=head)


def forward(
    weights: SimpleNamespace, tokens: list[int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The last hidden states at each position, and the logits that they give."""
    states, state = [], np.zeros(WIDTH, np.float32)
    for token in tokens:
        state = np.tanh(0.7 * state + weights.embed[token])
        states.append(state)
    hidden = np.stack(states)
    return hidden, hidden @ weights.head


def work(weights: SimpleNamespace, seed: bytes, prompt: int) -> tuple[list[int], bytes]:
    """What a worker hands in: tokens, and the proof of the states that they left."""
    words, tokens = draw_words([seed], 0, TOKENS)[0], [prompt]
    for word in words:
        _, logits = forward(weights, tokens)
        tokens.append(int(draw(logits[-1:], word[None], TEMPERATURE, RULE).tokens[0]))
    hidden, _ = forward(weights, tokens[1:])
    return tokens[1:], commit([hidden])[0]


def check(
    weights: SimpleNamespace, seed: bytes, prompt: int, tokens: list[int], proof: bytes
) -> str:
    """What a verifier finds with weights of its own; the work is one pass, not one a token."""
    [stats] = verify([proof], [forward(weights, tokens)[0]])
    _, logits = forward(weights, [prompt, *tokens[:-1]])
    again = replay(logits, tokens, draw_words([seed], 0, TOKENS)[0], TEMPERATURE, RULE)
    if isinstance(stats, Malformed):
        return f"no proof: {stats.reason}"
    wrong = int(again.mismatch.sum())
    states = stats.exponent_mismatches
    return f"{states:3} values of other states, {wrong:2} tokens not drawn by the seed"


def main() -> None:
    """An honest worker and three that cheat."""
    honest, smaller = model(1), model(2)
    seed = draw_seed(b"run", b"policy", b"worker", step=0, slot=0)
    other = draw_seed(b"run", b"policy", b"worker", step=0, slot=1)
    tokens, proof = work(honest, seed, prompt=3)
    picked = work(honest, other, prompt=3)
    altered = [*tokens[:40], (tokens[40] + 1) % VOCABULARY, *tokens[41:]]
    for name, claim in {
        "honest": (tokens, proof),
        "another model": work(smaller, seed, prompt=3),
        "another seed": picked,
        "altered token": (altered, proof),
        "half a proof": (tokens, proof[:-1]),
    }.items():
        print(f"{name:14} {check(honest, seed, 3, *claim)}")


if __name__ == "__main__":
    main()
