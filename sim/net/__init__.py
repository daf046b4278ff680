"""The simulated internet, which carries bytes between machines.

- `link` (read it first): what an access line does to bytes, and how well that meets real lines
- `fabric`: `Fabric`, all machines (`Endpoint`) and the wires between them; cuts, holds and
  clogs
- `stream`: byte streams over wires, with the back-pressure that TCP and Yamux give
- `relink`: gives waiting bytes new times when their line's speed changes
- `latency`: how far apart machines are, by region

How data flows: `Fabric.transmit` charges the sender's line and schedules `Fabric.arrive`, which
charges the receiver's line and then calls back. Hosts and networks (`sim.node`) are built on
that.

Workloads at level 0 call `Fabric.transmit` themselves; at the other levels only `sim.node`
calls this package.
"""
