"""Proofs of work done: arithmetic on arrays, with three verbs.

`commit` makes the activation proof of generated tokens; `verify` and `replay` measure how far a
claim is from the verifier's own prefill; `judge` decides whether that is within limits. Numpy
is all it needs: it knows of no network, no model and no clock.

- `checks` (read it first): evidence, limits, verdicts
- `sampling`: seeds, uniforms, seeded draws and their replay, by which a cheat's draw is found
  out
- `toploc`: activation proofs, byte for byte as the package toploc 0.1.6 writes them
- `field`: polynomials over GF(65497), for `toploc`

How data flows: a worker draws with `uniforms` and `choose`, and proves its hidden states with
`commit`. A validator's engine gives its own hidden states to `verify` and its own logits to
`replay` and `surprise`; what those say is one `Evidence` for each group. `check_shape` comes
before all of that, `judge` and `judge_pool` after it.

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
    judge_pool,
)
from proofs.sampling import (
    Replay,
    choose,
    draw_seed,
    logprobs,
    replay,
    surprise,
    task_seed,
    uniforms,
)
from proofs.toploc import Malformed, ToplocStats, commit, proof_size, verify

__all__ = [
    "Evidence",
    "Judgement",
    "Limits",
    "Malformed",
    "Reason",
    "Replay",
    "Shape",
    "ToplocStats",
    "Verdict",
    "check_shape",
    "choose",
    "commit",
    "draw_seed",
    "judge",
    "judge_pool",
    "logprobs",
    "proof_size",
    "replay",
    "surprise",
    "task_seed",
    "uniforms",
    "verify",
]
