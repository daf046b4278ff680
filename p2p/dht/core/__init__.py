"""The pure half of the DHT: no I/O here, by contract (tests/test_architecture.py).

`core` is the state machine. It gives requests to `responder` (what we answer, and its quotas)
and replies to `requester` (what we ask), which runs the `operations` through each a `lookup`
and through `calls` (open requests and their timeouts). Each of the others owns one piece of
state: `table` (the routing table), `neighbours` (it, and the history of its contacts), `store`
(records held for others), `publications` (our own records). `validation` and `diversity` are
rules without state. `events` lists what goes in and what comes out.
"""
