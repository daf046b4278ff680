"""Benchmarks: ``python -m bench NAME`` runs one; several share `report` and `rl_like`.

`prime` is a quantiser to compare with.
"""
