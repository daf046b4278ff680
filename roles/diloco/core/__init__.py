"""What members of a DiLoCo run decide and compute without I/O.

Read `round` first: how members agree on each outer step. `election` has its majorities,
`messages` what is said and signed, `events` what goes in and comes out. `quant` encodes
contributions in few bits, `pieces` says who sums what and how, `outer` takes the step. `prime`
is the quantiser of PRIME, for comparison.
"""
