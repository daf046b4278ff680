"""Decisions and arithmetic of a DiLoCo run's members, without I/O.

Read `round` first: how members agree on each outer step. `election` has its majorities,
`hearing` says who is heard, as most members say, `messages` what is said and signed, `events`
what goes in and comes out. `quant` encodes contributions in few bits, `pieces` says who sums
what and how. `outer` is the state that all hold alike, and its steps: DiLoCo's, or data
parallel's, on a fragment of the model or all of it. `windows` says which text is whose.
"""
