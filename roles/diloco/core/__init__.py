"""Decisions and arithmetic of a DiLoCo run's members, without I/O.

Read `round` first: how members agree on each outer step. `election` has its majorities,
`hearing` the presence of members by most members' reports, `messages` the signed statements,
`events` the core's inputs and outputs. `quant` encodes contributions in few bits; `pieces`
assigns sums to owners and computes them. `outer` has the common state and its steps: DiLoCo's,
or data parallel's, on a fragment of the model or all of it. `windows` assigns text to members.
"""
