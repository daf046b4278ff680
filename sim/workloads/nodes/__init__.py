"""Whole nodes, as the command line starts them, spread policies: one workload for every level.

Read `workload` first. The same on all levels are what the nodes do (`roles`), who takes part
(`deployment`), and what nodes say of themselves and the metrics that follow from it
(`metrics`). `workload` plays all this in a simulation (L1, L2), `flow` as a flow on the heap
(L0), `processes` as processes on shaped lines (L3).
"""
