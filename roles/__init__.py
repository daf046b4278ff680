"""Roles of a node, and the packages that they need.

A submission's way through the folders: `roles.inference` draws and submits it,
`roles.validator` replays it and signs a verdict, `roles.trainer` learns from it and publishes
the next policy. Each of the three has a `role` (what a node opens: configuration and health), a
`session` (its work for one run; read this first), and beside them what the session owns.

`roles.protocol` is what they say to each other. `roles.workers` is how a node calls worker
processes, and `roles.shared` has what all layers use. `roles.contract` is the signed run file,
`roles.rl` the learning recipe. `roles.engines` samples, scores and trains, in a worker process;
`roles.models` reads the folder of a model; `roles.envs` has the tasks and checks the answers.
`roles.diloco` is the other algorithm: many trainers pre-train one model on text. `roles.demo`
is a whole swarm on one machine; `roles.own` makes and plays a run of one's own;
`roles.calibrate` measures what honest work of a run looks like, for its limits; `roles.doctor`
says what a machine lacks; `roles.ledger` reads what nodes have signed, and makes receipts of
it; `roles.chat` lets a person talk to what was trained, and measures it.

`roles.trl` is TRL as the learner of a run, in a process of its own.

`shoal` is the command line, which imports the rest once it has been asked for something.
"""
