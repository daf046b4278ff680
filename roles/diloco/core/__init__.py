"""What members of a DiLoCo run decide and compute without I/O.

Read `round` first: how members agree on each outer step. `election` has its majorities,
`hearing` says who is heard, as most members say, `messages` what is said and signed, `events`
what goes in and comes out. `quant` encodes contributions in few bits, `pieces` says who sums
what and how, `fragments` which part of the model a step exchanges. `outer` is the state that
all hold alike, `algorithm` takes its steps: DiLoCo's, or data parallel's. `windows` says which
text is whose.
"""
