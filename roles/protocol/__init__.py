"""What the roles say to each other.

The folder `core` has what needs no I/O: `messages`, the bytes of a submission and of a verdict,
`assignment`, which work is whose and who judges it, `demand`, how much of it is asked for,
`judging`, what makes it acceptable, and `lies`, how sure it is that a validator's verdict is
false. `replay` repeats a verdict with an engine and an environment, for a trainer or a
bystander. `demand` is what a node hears of its trainer, `reading` is a
submission as it arrives, `request` asks a peer until there is an answer, over the host.
"""
