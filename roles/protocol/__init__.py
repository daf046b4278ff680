"""What the roles say to each other.

The folder `core` has what needs no I/O: `messages`, the bytes of a submission and of a verdict,
and `assignment`, which work is whose and who judges it. `request` asks a peer until there is an
answer, over the host.
"""
