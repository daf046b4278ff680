"""The inference role: does the tasks assigned to its node, and submits them for a verdict.

Read `session` first: from the newest policy to a signed verdict. `places` are the submissions
that the engine draws side by side; `outbox` keeps each on disk from before it is sent until its
verdict; `windows` commits to them where lots fall, and sees each to its end, and `promise` is
what they say of the next policy to work under; `earned` keeps what receipts are made of;
`stats` counts for people what this life did, `life` what all lives did, `status` makes a
snapshot and words of both, and `panels` is what the dashboard shows; `config` is the owner's
table; `appeals` tells the trainer of judges that are of no use; `work_stamp` is made before the
first submission where the run asks for one; `role` is what a node opens.

How data flows: a policy from SHARDCAST is loaded into the engine; `roles.protocol` derives the
next tasks and seeds; the engine draws and proves; a `Commitment` is signed; the outbox keeps
it; the validator is asked until there is a verdict.
"""

from roles.inference.config import InferenceConfig
from roles.inference.role import Inference

__all__ = ["Inference", "InferenceConfig"]
