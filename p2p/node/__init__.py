"""One node: the composition root, its configuration, and the command line.

A node is a host, the swarm services (membership, gossip, DHT, SHARDCAST), one run, and roles.
Nothing here knows what a role does.

The files, in the order in which to read them
---------------------------------------------
`node` opens all of it in one function, `open_node`, in production and in the simulator alike.
`services` is what it gives: a `Node`, as roles see it; `role` is what a role must be; at the
`border` mistakes in what a role says of itself stop. `wiring`
is what services learn from each other, and how a node finds its fellows; `policies` is the part
of it that `p2p.cast` has as well, `stories` how all learn that an officer of the run has told
two. `rundoc` keeps the run document: where it comes from, what
may replace it, which peer gets it; `rival` keeps the proof if its owner has signed two of one
epoch; `admission` asks it who may do what. `invite` lets in whom it does not name, `guests`
counts them, `credential` is what they show in heartbeats, `bearer` is one of them. `clock`
tells peers the time; `share` and `rest` are what an owner lends of the machine, and when.
`trouble` is what one peer may cause, and what a person can look into then.

Around that, a process: `commands` (the command line ``shoal``), `cli` (``shoal node``),
`usage` (what all our command lines do alike), `process`
(folder, lock, log, signals), `logs` (what the log looks like), `screen` (what a person is
shown, as lines) and `live` (writes them), `dashboard` (the page, the numbers, the commands that
ask), to which roles contribute `panels`.
Configuration: `config` (one table per component), read by `toml` into the frozen dataclasses of
`tables`. `plugins` finds roles and readers of run documents in other packages, by their
`entries`.

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
