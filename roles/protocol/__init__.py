"""What the roles say to each other.

The folder `core` has what needs no I/O: `messages`, the bytes of a submission and of a verdict,
`assignment`, which work is whose and who judges it, `judging`, what makes it acceptable, and
`lies`, how sure it is that a validator's verdict is false. `replay` repeats a verdict with an
engine and an environment, for a trainer or a bystander. `request` asks a peer until there is an
answer, over the host.
"""
