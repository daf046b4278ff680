"""Learning settings and algorithms of a run, without a model.

`learner` reads ``learner.toml``, and `recipes` has the numbers that work, by kind of model.
`algorithms` has what the learner of the torch engine turns rewards into advantages by, and
log-probs into a loss.
"""
