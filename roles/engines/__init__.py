"""Engines, which sample, score and train a policy.

Read `base` first: what a role may ask of one, and the values that cross the border. `config` is
what an engine is made of, and what a machine's owner allows. `client` opens one in a process of
its own (`roles.workers`), where `worker` answers its calls; `codec` has the records of the
files between them. `fake` needs no model and is for simulations; `torch` computes, and so does
`vllm`, for large models and for GPUs, but for training. `external` is a trainer of somebody's
own in the learner's place. `replay` makes evidence of what a scorer reads, for any engine that
computes. `adapters` reads what a learner with ``[lora]`` has learnt, and writes it for PEFT.
`evaluation` asks for held-out tasks and sums up the rewards. `hardware` is what a machine has
to compute with, `installed` says what a Python lacks.

How data flows: tasks and seeds go into a file, and a frame on the worker's standard input says
where it is; the worker calls its engine; tokens, proofs or evidence come back in another file
and a frame that names it. Weights travel as files.

A role calls `open_engine`, and then `load`, `submit` and `advance` (inference), `load` and
`score` (a validator), or `open`, `step`, `save` and `answer` (a trainer).
"""
