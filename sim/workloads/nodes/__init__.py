"""Whole nodes, as the command line starts them, spread policies: one workload for every level.

`roles` is what the nodes do, `cast` who takes part, `tale` what they tell and what follows from it: these
are the same on all levels. `workload` plays it in a simulation (L1, L2), `flow` as a flow on the heap (L0),
`real` as processes on shaped lines (L3).
"""
