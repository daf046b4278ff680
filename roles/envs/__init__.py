"""Environments: where tasks come from, and who checks the answers.

Read `base` first: what an environment has to be; `sort` is the one that comes with Shoal. A
role sees it through `client`, which runs foreign ones in a process (`worker`) with limits on
time and memory (`ration`); `contained` turns any exception or invalid reward into one error
type; `installed` computes the digest that a run pins.

How data flows: seeds that no node chooses go in, tasks come out; completions go in, rewards
come out, computed again by the validator and by the trainer.

A role calls `open_environment_of`, then `ContainedEnvironment.tasks` and `.rewards`. An author
writes a class like `SortEnvironment` and names it under the entry point group ``shoal.envs``
(docs/extending.md).
"""
