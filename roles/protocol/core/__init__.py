"""What the roles say to each other, without I/O: by contract, as every folder `core`.

`window` is what a worker commits to, under `terms`; `answer` is what trainer and scorers reply,
`verdict` what a scorer signs, and `conviction` the proof against who lied. `messages` are the
bytes of submissions and verdicts. `assignment` derives which tasks and draws are a node's, and
which validator judges it, so that neither is chosen by it. `judging` is what validator and
trainer both ask of a submission's groups; `demand` says whose turn it is to do
how much; `lies` weighs what a trainer finds of a validator, and is the proof that it keeps.
`account` is what a trainer tells a node of what
became of its work. `statements` are the kinds of entries in ledgers, and `work` counts tokens
and FLOPs.
"""
