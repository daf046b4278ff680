"""The inference role: does the tasks assigned to its node, and submits them for a verdict.

Read `session` first: from the newest policy to a signed verdict. `places` are the submissions
that the engine draws side by side; `outbox` keeps each on disk from before it is sent until its
verdict; `earned` keeps what receipts are made of; `glance` shows people some of the answers;
`stats` counts for people what this life did, `life` what all lives did, `status` makes a
snapshot and words of both, and `panels` is what the dashboard shows; `config` is the owner's
table; `work_stamp` is made before the first submission where the run asks for one; `role` is
what a node opens.

How data flows: a policy from SHARDCAST is loaded into the engine; `roles.protocol` derives the
next tasks and seeds; the engine draws and proves; a `Commitment` is signed; the outbox keeps
it; the validator is asked until there is a verdict.
"""

from roles.inference.config import InferenceConfig
from roles.inference.role import Inference

__all__ = ["Inference", "InferenceConfig"]
