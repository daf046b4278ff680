"""What a validator decides without I/O: whose submission is next, and what its place says.

`turnstile` says which stranger is heard next, before a byte of it is read. `fair_queue` gives
nodes their turns at the one scorer. `sequence` knows which places in the
draw order each node has filled: a replay and a gap are found here.
"""
