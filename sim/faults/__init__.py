"""Faults of a simulation, and their times.

- `plan` (read it first): `Fault`, one thing that goes wrong, as data; plans are drawn, saved,
  loaded
- `injector`: `FaultInjector`, which lets the faults of plans happen to simulated nodes
- `overlapping_faults`: the joint effect of several faults on one line, disk or clock
- `shrink`: from a failing plan to the few faults that matter
- `churn`: machines that come and go, by distributions or as recorded

How data flows: a scenario's ``[[faults]]`` and those that `draw_plan` draws are lists of
`Fault`; `FaultInjector.apply` puts them on the heap; each is undone at its end. Level 3 takes
the same plans: `sim.studies.lab.faults` does them to processes.

A newcomer writes ``[[faults]]`` in a scenario, or calls ``FaultInjector(swarm).apply(plan)``.
"""
