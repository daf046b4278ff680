"""A simulated machine, and the swarm of them: the simulated side of `World`, `Host` and
`Network`.

- `swarm` (read it first): `SimNode`, a machine with a name, a line, a disk and a clock, which
  lives several lives; `Swarm`, all of them: add, kill, restart, partition, hold, release
- `world`: `SimWorld`, the `p2p.world.World` of one life
- `disk`, `clock`: what outlives a life: files and what a crash takes of them; clocks that may
  lie
- `host`: `SimHost`, the `p2p.host.Host` without handshakes (level L1), and its connections
- `network`: `SimNetwork`, the `p2p.network.Network` of raw streams (level L2)

How data flows: `Swarm.add` starts a life, a task with a fresh `SimWorld`. What it sends goes
through its host or network to `sim.net.fabric`, and arrives as a callback in the name of the
receiver's life. `Swarm.kill` ends the life: its tasks are cancelled and its events die with it.

A newcomer calls `open_swarm`, `Swarm.add` and `SimNode.open_host`, and in tests of failures
`Swarm.kill`, `Swarm.restart`, `Swarm.partition` and `Swarm.repair`.
"""
