"""A Qwen3-style model in plain torch with sampler, scorer and learner: the default engine.

`engine` is what the worker process calls, and holds one policy. `model` is the transformer;
`sampler` draws completions from it, `scorer` replays other nodes' completions, `learner` takes
the steps of training. `files` reads and writes weights and checkpoints.
"""
