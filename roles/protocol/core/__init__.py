"""What the roles say to each other, without I/O: by contract, as every folder `core`.

`window` is what a worker commits to, under `terms`; `answer` is what trainer and scorers reply,
`verdict` what a scorer signs, and `conviction` the proof against who lied. `messages` are the
bytes of submissions and verdicts. `assignment` derives which tasks and draws are a node's, and
which validator judges it, so that neither is chosen by it. `judging` is what validator and
trainer both ask of a submission's groups; `demand` says whose turn it is to do
how much; `lies` weighs what a trainer finds of a validator, and is the proof that it keeps.
`refusals` is the same of a validator that rejects honest work, and what workers say of theirs;
`away` says whom the trainer passes over. `standing` is what a worker has earned: how much of
its work is checked, and whether the rest may be learnt from; `pooled` finds who leans to one
side over hours. `beacon` is chance that nobody predicts, `lots` say by it which places are
checked and by whom, and `settlement` is what the trainer is told of that. `bans` shuts out who
was caught lying, by enough officers' word. `account` is what a trainer tells a node of what
became of its work. `statements` are the kinds of entries in ledgers, and `work` counts tokens
and FLOPs.
"""
