"""Level L3: real processes on real, shaped links.

Two things are done with them. The link model is judged: `topologies` says who is connected to
whom and how well, `broadcast` is the program every machine runs, `simulated` runs it in a
simulation (L1, L2), `real` as processes over TCP. And whole nodes play scenarios: `street`
gives each process a machine, `theatre` plays a `sim.run.scenario.RealWorkload` there.
`namespaces` makes machines and lines for both.
"""
