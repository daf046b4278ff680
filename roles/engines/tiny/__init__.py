"""A Qwen3-style model in plain torch, with its sampler, scorer and learner: the embedded
default engine.
"""
