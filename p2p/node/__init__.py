"""A node: the composition root, its configuration, and the command line.

A node is a host, the swarm services (membership, gossip, DHT, SHARDCAST), one run, and roles.
Nothing here knows what a role does.

The files, in the order in which to read them
---------------------------------------------
`node` opens all of it in one function, `open_node`, in production and in the simulator alike.
`role` is what it gives, a `Node` as roles see it, and what a role must be. `wiring` is what
services learn from each other, and how a node finds its fellows; `policies` is the part of it
that `p2p.cast` has as well. `rundoc` keeps the run document: where it comes from, what may
replace it, which peer gets it, and the proof if its owner has signed two of one epoch;
`admission` says who may do what, by the document or by invite, and `guests` counts who
is in by invite. `clock` tells peers the time; `share` is what an owner lends of the machine,
and when. `trouble` is what one peer may cause, and what a person can look into then.

Around that, a process: `commands` (the command line ``shoal``),
`cli` (``shoal node``), `usage` (what all our command lines do alike), `folders` (which node a
command is about), `process` (folder, lock, log, signals), `screen` (what a person is shown on
a terminal), `dashboard` (the page, the numbers, the commands that ask), to which roles
contribute `panels`. Configuration: `config` (one table per component), read into frozen
dataclasses by `tables`. `plugins` finds roles and readers of run documents in other packages,
by their `entries`.

How data flows
--------------
A document is pinned, then gossip, the DHT, membership and SHARDCAST are opened in this order,
each given callables instead of the others: heartbeats become SHARDCAST's roster, a manifest
that SHARDCAST publishes becomes a gossip message, the run document decides who may publish, and
our heartbeat announces each policy that is complete here. Then `run_roles` runs the roles.

A newcomer calls `open_node` and `run_roles`. A role is given the `Node` and uses its services:
``node.shardcast.wait_policy``, ``node.host.open_stream``. The command line is ``python -m
p2p.node``.
"""
