"""Environments, which make tasks and check answers.

Read `base` first: what an environment has to be, and `text`, the same for authors of questions
in text. `mix` combines all environments that a run names. A role sees them through `client`,
which runs foreign ones in a process (`worker`, `frames`) with limits on time and memory
(`ration`); `contained` turns any exception or invalid reward into one error type; `installed`
computes the digest of code that a run pins, `data` reads the files that it pins.

An environment may answer the model within a completion (`turns`): only what the model draws
travels, and whoever replays it asks the environment again.

These come with Shoal: `sort` and `guess` for models without a base; for those with one
`arithmetic`, `questions` (``math`` and ``math-exact``, from a file of this machine), `gym`
(reasoning-gym), `code` (programs paid by tests) and, in turns, `calculator`, `python` and
`search` (of a corpus).
`wasm` runs code of strangers with fuel, the same everywhere, and `capsule` whole environments,
which travel with a run. `answers` finds the final answer
in a completion, and `formulas` compares it, where that is cheap. `check` tries the laws of all
of them: rewards that repeat, answers that earn themselves; `examine` does it in two processes
that differ in all that must not matter.

How data flows: seeds that no node chooses go in, tasks come out; completions go in, rewards
come out, computed again by the validator and by the trainer.

A role calls `open_environment_of`, then `ContainedEnvironment.tasks` and `.rewards`. An author
writes a class like `ArithmeticEnvironment` and names it under the entry point group
``shoal.envs`` (docs/extending.md).
"""
