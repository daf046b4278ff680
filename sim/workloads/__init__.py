"""Workloads of the scenarios. They and the studies may import roles.

A scenario file names its workload as ``module:Class`` (`sim.run.scenario.Workload`). Begin with
`churn`, the plainest one. By what they ask:

- membership: `churn`, machines that come and go; `hostile`, members that attack
- DHT: `dht`, records that must not be forged or lost
- SHARDCAST: `policies`, real services, some nodes late, slow or lying (`participants`)
- `shoal push`: `cast`, one that pushes and many that pull later
- whole nodes: `nodes`, on levels 1 to 3, also behind routers; `spine`, the demo's swarm;
  `soak`, weeks of churn
- pre-training: `diloco`, sites that come and go, and lie; `inner`, pretended inner steps

`run_file` signs the run of whole nodes; `supervision` restarts a process whose disk has failed.
How data flows: ``run`` adds nodes to the swarm, sleeps until the scenario's duration is over,
and returns metrics by name; the scenario's ``[[expect]]`` set bounds for them.
"""
