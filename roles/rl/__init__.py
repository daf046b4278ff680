"""The learning recipe: its numbers and its formulas, without a model.

Read `recipe` first: each number with its meaning, its reason, and what else was tried;
`recipes` has those that work, by kind of model. The
learner (`roles.engines.torch.learner`) turns the rewards of a group into advantages by
`advantage`, and log-probs and advantages into a loss by `losses`. `evaluation` asks the
held-out tasks; `gate` says, of the first evaluation and the last, whether a run has learned.
"""
