"""A Qwen3-style model in plain torch with sampler, scorer and learner: the default engine.

Read `model` first, the transformer. `engine` is what the worker process calls, and holds one
policy. `sampler` draws completions from it, `scorer` replays other nodes' completions,
`learner` takes the steps of training, over groups that `packing` has laid into one row each.
`files` reads and writes weights and checkpoints.

How data flows: `sampler` keeps the hidden state behind each token, from which `proofs.toploc`
makes the proof; `scorer` computes the same states by one prefill, and the logits from them, and
hands both to `proofs`.

Nothing here is called but by `roles.engines.worker` and by ``python -m roles.demo.alone``.
"""
