"""A Qwen3-style model in plain torch with sampler, scorer and learner: the default engine."""
