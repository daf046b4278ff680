"""What the nodes of scenarios do: the only part of the simulator that may import roles.

A scenario file names its workload as ``module:Class`` (`sim.run.scenario.Workload`). Begin with
`churn`, the plainest one. By what they ask:

- membership: `churn`, machines that come and go; `hostile`, members that attack
- DHT: `dht`, records that must not be forged or lost
- SHARDCAST: `policies`, real services, some nodes late, slow or lying (`participants`);
  `spread`, one origin and many receivers, most of them behind NAT; `broadcast`, a flow for
  10,000 nodes (L0)
- `shoal push`: `cast`, one that pushes and many that pull later
- whole nodes: `nodes`, on levels 1 to 3; `spine`, the demo's swarm; `soak`, weeks
  of churn
- a large run: `intellect2`, the published broadcast and ours (L0); `volunteers`, the real roles
  with the speeds of real machines (`profiles`)
- pre-training: `diloco`, sites that come and go, and lie; `intellect1`, a published run and
  ours on its sites; both pretend the inner steps (`inner`)

`supervision` restarts a process whose disk has failed. How data flows: ``run`` adds nodes to
the swarm, sleeps until the scenario's duration is over, and returns metrics by name; the
scenario's ``[[expect]]`` set bounds for them.
"""
