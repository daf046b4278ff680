"""What every role uses, and none owns.

Read `standing` and `durable` first: roles ask the one before every signature, and write through
the other.

* `bounds`: what numbers of a run file make sense at all;
* `standing`: whether a role may work now;
* `durable`: writes that a role cannot do without;
* `checked_json`: small files that notice damage;
* `model_files`: what all policies of a run with a base have in common, kept once;
* `seats`: how many streams are read at a time;
* `reasons`: sentences of peers, counted apart and fit for a terminal;
* `worker_streams`: frames on the standard streams of a worker process.
"""
