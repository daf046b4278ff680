"""What every role uses, and none owns.

`bounds` (what numbers of a run file make sense), `standing` (whether a role may work now),
`durable` (writes that a role cannot do without), `checked_json` (small files that notice
damage), `seats` (how many streams are read at a time), `reasons` (counts of sentences, fit for
a terminal), `worker_streams` (frames on the standard streams of a worker process).
"""
