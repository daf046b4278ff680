"""What every role uses, and none owns.

Read `standing` and `durable` first: roles ask the one before every signature, and write through
the other.

* `bounds`: what numbers of a run file make sense at all;
* `sizes`: how long the messages of a run may be;
* `standing`: whether a role may work now;
* `durable`: writes that a role cannot do without;
* `checked_json`: small files that notice damage;
* `model_files`: what all policies of a run with a base have in common, kept once;
* `seats`: how many streams are read at a time;
* `trainer_watch`: whether the trainer is there, and what became of this node's work;
* `reasons`: sentences of peers, counted apart and fit for a terminal;
* `worker_start`: worker processes of a machine that has no room for another;
* `worker_streams`: frames on the standard streams of a worker process.
"""
