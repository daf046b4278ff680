"""How a run learns, without a model.

`recipes` has the numbers that work, by kind of model. `algorithms` has what the learner
(`roles.engines.torch.learner`) turns rewards into advantages by, and log-probs into a loss.
"""
