"""The inference role: does the tasks assigned to its node, and submits them for a verdict.

Read `session` first: it leads from the newest policy to full places. `places` are those that
the engine draws side by side; `windows` commits to full places, sends wanted content to the
scorer that the trainer names, and settles the places; `outbox` keeps each place on disk until
then; `glance` shows people some of the answers; `life` counts over all processes of the node,
`status` over this one, and puts both into words; `panels` are those of the dashboard;
`work_stamp` is made before the first window where the run requires one; `role` is the entry for
a node.

Data flow: a policy from SHARDCAST is loaded into the engine; `roles.protocol` derives the next
tasks and seeds; the engine draws and proves; the outbox keeps the place; a window of places is
signed and sent; the scorer is asked until there is a verdict.
"""

from roles.inference.role import Inference

__all__ = ["Inference"]
