"""Messages between the roles, and the scorer that trainer and validators share.

The folder `core` has statements and rules without I/O. `scorer` repeats what a worker has done
to a place, for trainer and validators; `replay` has what repeating a place has in common,
`history` the draws of each worker's last submissions, `stats` counts for people. `door` says
which peers are heard, and in which order, `seats` how many streams are read at a time;
`reading` reads a request and its content; `request` asks a peer until there is an answer.
`standing` says whether a role may work now; `trainer_watch` whether the trainer is there, and
what became of this node's work; `model_files` keeps what all policies of a base share;
`machine` is the owner's table of a role, and opens its engine and environment.
"""
