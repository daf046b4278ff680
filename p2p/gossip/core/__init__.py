"""The pure half of gossip: no I/O here, by contract (tests/test_architecture.py).

`core` is the state machine and the only module that knows the others. Each of those owns one
piece of its state: `mesh` (subscribers, meshes, fanouts, backoffs), `seen` (message ids),
`message_cache` (messages for IWANT), `promises` (what IWANT asked for), `quotas` (what a peer
may cost), `peer_scores` (how a peer behaved). `events` lists what goes in and what comes out.
"""
