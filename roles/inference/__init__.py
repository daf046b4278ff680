"""The inference role: does the tasks assigned to its node, and submits them for a verdict.

Read `session` first: from the newest policy to full places. `places` are those that the engine
draws side by side; `windows` commits to full places, sends what the trainer wants to the scorer
that it names, and settles them; `outbox` keeps each on disk until then; `glance` shows people
some of the answers; `life` counts what all lives did, `status` what this one did, and makes
words of both; `panels` is what the dashboard shows; `work_stamp` is
made before the first window where the run asks for one; `role` is what a node opens.

How data flows: a policy from SHARDCAST is loaded into the engine; `roles.protocol` derives the
next tasks and seeds; the engine draws and proves; the outbox keeps the place; a window of
places is signed and sent; the scorer is asked until there is a verdict.
"""

from roles.inference.role import Inference

__all__ = ["Inference"]
