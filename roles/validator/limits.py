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
nodes. As long, a node may come from another validator's hands in the middle of its places."""
AHEAD: Final = 8
"""Policies beyond the newest here that a worker may name, and have waited for: it is a forest
or two ahead. More it has not got from any trainer."""
HEADS: Final = 32.0
"""Heads of nodes without accepted work that are heard in a second, all together: at 0.6 ms each
2 % of a core. A scorer judges fewer."""
HEADS_AT_ONCE: Final = 64.0
"""Of them after a pause: sixteen newcomers with the four that each has under way."""
OWN_HEADS: Final = 64.0
"""Heads of one node with accepted work that are heard in a second before it waits among those
without: a GPU hands in a few, and a single acceptance is no pass for a flood."""
AT_DOOR: Final = 1024
"""Streams of such nodes that wait to be heard: 128 nodes with eight each, 7 MiB."""
AT_DOOR_PER_NETWORK: Final = AT_DOOR // 8
"""Of one network, as of seats."""
DOOR_SECONDS: Final = 60.0
"""How long such a stream waits at most: twice what a full door takes, and less than its peer
waits for an answer."""
WEARY_SECONDS: Final = 0.5
"""How soon to look again after nodes that wait because much was rejected: one more is forgiven
in as long."""
KNOWN: Final = 65_536
"""Verdicts that are found again by the place that they are about, beside all under policies
that are not stale: 16 MB. A worker that asks about an older one is told that its policy is
stale, which it knows."""
PASSING: Final = 1024
"""Rejections of nodes without accepted work that are remembered, 1 KB each, and are in no
ledger: a node that asks again later, or after a restart, is judged again, by the same rule."""
GIVEN_UP: Final = 1024
"""Submissions given up whose verdicts are remembered: four under way from each of 256 nodes."""
