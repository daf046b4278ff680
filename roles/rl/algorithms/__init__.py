"""Policy-gradient algorithms: two pure functions each, found by name.

An algorithm is a frozen dataclass of its options with two methods (`base.Algorithm`):
`advantages` turns the rewards of groups into one number a completion, and `loss` turns the
log-probs of a batch into a scalar. `base` has what they are given and the formulas that they
share; `find` finds one by the name of its entry point, with the options that every algorithm
has. Shipped are `grpo`, `dapo`, `dr_grpo`, `cispo` and `gspo`. None of them imports torch: they
are given tensors.
"""
