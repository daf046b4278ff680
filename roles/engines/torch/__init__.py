"""Decoders of three families in plain torch, with sampler, scorer, learner: the default engine.

Read `model` first, the transformer; `hosted` is the same of other architectures, with layers of
transformers. `engine` is what the worker process calls, and holds one policy. `sampler` draws
completions from it, `scorer` replays other nodes' completions. `learner` trains a model
(`training`), or by `lora` low-rank sums in it: `packing` lays a group into one row, `gradient`
computes loss and gradients batch by batch. `files` reads and writes weights,
`policy` those of a step, `checkpoint` what a learner needs to go on.

How data flows: `sampler` keeps the hidden state behind each token, from which `proofs.toploc`
makes the proof; `scorer` computes the same states by one prefill, and the logits from them, and
hands both to `instruments`: `proofs` on the CPU, the same arithmetic in torch on a GPU
(`device_draws`).

What computes is a `device`, by which every tensor here is made. A learner may be several
processes, a GPU each: `ranks` starts them, each is a `rank`, `sharding` spreads the weights.

The node's own process never imports torch: worker processes (`roles.engines.worker`,
`roles.diloco.worker`), commands such as ``shoal chat`` and benchmarks import this package.
"""
