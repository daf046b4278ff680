"""Whole nodes, as the command line starts them, spread policies: one workload for L1 to L3.

Read `workload` first. Three modules are the same on all levels: `roles` (what the nodes do),
`deployment` (who takes part) and `metrics` (what nodes say of themselves, and the metrics that
follow from it). `workload` plays all this in a simulation (L1, L2),
`sim.studies.lab.processes` as processes on shaped lines (L3).
"""
