"""The pure half of the DHT: no I/O here, by contract (tests/test_architecture.py).

`core` is the state machine. It gives requests to `responder` (what we answer, and its quotas)
and replies to `requester` (what we ask). The requester runs each operation by a
`lookup`, and keeps open requests and their timeouts in `calls`. Each of the others owns one
piece of state: `table` (the routing table), `neighbours` (that table, and the history of its
contacts), `store` (records held for others). `validation` has rules
without state. `events` lists what goes in and what comes out.
"""
