"""Proofs of work done: arithmetic on arrays, with three verbs.

`commit` makes the activation proof of generated tokens; `verify` and `replay` measure how far a
claim is from the verifier's own prefill; `judge` decides whether that is within limits. Numpy
is all it needs: it knows of no network, no model and no clock.

- `checks` (read it first): evidence, limits, verdicts
- `sampling`: seeds, draw words, noise, and the rules by which they make a token
- `draws`: tokens from logits, and their replay, by which a cheat's draw is found out
- `toploc`: activation proofs, byte for byte as the package toploc 0.1.6 writes them
- `field`: polynomials over GF(65497), for `toploc`

How data flows: a worker draws with `draw_words` and `draw`, and proves its hidden states, kept
as `TopValues` while it decodes, with `commit`. A validator's engine feeds its own hidden states
to `TopValues` for `verify`, and its own logits, block by block, to `DrawStatistics`; what those
say is one `Evidence` for each group. `check_shape` comes before all of that, `judge`,
`judge_pool` and `judge_draws` after it.

A newcomer calls `commit` and `verify`; a run's owner calibrates `Limits`.
"""

from proofs.checks import (
    Evidence,
    Judgement,
    Limits,
    Reason,
    Shape,
    Verdict,
    check_shape,
    judge,
    judge_draws,
    judge_pool,
)
from proofs.draws import DrawnTokens, DrawStatistics, Replay, draw, replay
from proofs.sampling import DrawRule, draw_seed, draw_words, task_seed, uniforms
from proofs.toploc import Malformed, ToplocStats, TopValues, commit, proof_size, verify, worst

__all__ = [
    "DrawRule",
    "DrawStatistics",
    "DrawnTokens",
    "Evidence",
    "Judgement",
    "Limits",
    "Malformed",
    "Reason",
    "Replay",
    "Shape",
    "TopValues",
    "ToplocStats",
    "Verdict",
    "check_shape",
    "commit",
    "draw",
    "draw_seed",
    "draw_words",
    "judge",
    "judge_draws",
    "judge_pool",
    "proof_size",
    "replay",
    "task_seed",
    "uniforms",
    "verify",
    "worst",
]
