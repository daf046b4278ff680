"""Comparison of the link model of `sim.net.link` with real lines: one broadcast, played three
ways.

- `topologies` (read it first): six trees of machines with lines of different speeds
- `broadcast`: what each machine of a tree does, the same code over virtual and real streams
- `simulated`: a tree in a simulation, over hosts (L1) or raw streams (L2)
- `real`: the same tree as processes over TCP on shaped lines (L3)
- `maxmin`: the same by exact fair sharing of lines, where there are no real lines to compare
  with

``python -m bench links`` runs all and prints the differences (bench/links.md).
"""
