"""The pure half of gossip: no I/O here, by contract (tests/test_architecture.py).

`core` is the state machine and the only module that knows the others. Each of those owns one
piece of its state: `mesh` (subscribers, meshes, fanouts, backoffs), `caches` (message ids seen,
messages for IWANT), `promises` (what IWANT asked for, and how peers behaved), `quotas` (what a
peer may cost). `events` lists what goes in and what comes out.
"""
