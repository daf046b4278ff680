"""How a run learns, without a model.

`learner` has the keys of ``learner.toml``, and `recipes` the numbers that work, by kind of
model. The learner (`roles.engines.torch.learner`) turns the rewards of a group into advantages
by `advantage`, and log-probs and advantages into a loss by `losses`.
"""
