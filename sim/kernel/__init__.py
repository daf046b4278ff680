"""Virtual time, the base of all simulations, with and without trio.

- `queue` (read it first): `EventQueue`, one heap of callbacks in order of integer nanoseconds
- `virtual_time`: `SimClock`, which lets trio run on that heap; `run_simulation` and `run_bare`
- `simulation`: `Simulation`, what all nodes of one seed share: heap, trace, keys, witnesses
- `trace`: every event in order, as one rolling hash
- `keys`: keys and random generators as functions of the seed
- `determinism`: the few private names of trio that are touched, and the doors that are closed

How data flows: what should happen later is given to `EventQueue.schedule` with an `Owner` (one
life of one node). trio asks `SimClock` how long to sleep when no task can run; the clock runs
events until one wakes a task. Each event that runs is recorded in the `Trace`.

A newcomer calls `run_simulation` only, and inside it `Simulation.rng` and `Simulation.plot`.
"""
