"""What peers can make a validator hold, and how long it waits for them."""

from __future__ import annotations

from typing import Final

RECORDING: Final = 8
"""Verdicts that the disk may be busy with: a synced write takes as long as scoring a
submission."""
POLICY_SECONDS: Final = 20.0
"""How long to wait for a policy that a worker has and this validator has not, before the worker
is told to ask again: the time of one forest."""
FORTHCOMING: Final = 64
"""Submissions that may wait, unread, for policies to come; nodes without accepted work have
half of it."""
FORTHCOMING_PER_PEER: Final = 4
"""Of one peer: what an honest one has under way."""
REPLY_SECONDS: Final = 10.0
"""How long a peer may take to accept an answer, which fits into its window."""
SUCCESSION: Final = 600.0
"""Seconds for which an edition with other validators is on its way to all nodes: each asks one
other a minute, so that those who have it double each minute, and ten minutes reach a thousand
nodes. As long, the first place of a node under a policy is taken for the next after those that
another validator judged."""
WEARY_SECONDS: Final = 0.5
"""How soon to look again after nodes that wait because much was rejected: one more is forgiven
in as long."""
KNOWN: Final = 65_536
"""Verdicts that are found again by the place that they are about, beside all under policies
that are not stale: 16 MB. A worker that asks about an older one is told that its policy is
stale, which it knows."""
GIVEN_UP: Final = 1024
"""Submissions given up whose verdicts are remembered: four under way from each of 256 nodes."""
