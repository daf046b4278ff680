"""The pure half of gossip: no I/O here, by contract (tests/test_architecture.py)."""
