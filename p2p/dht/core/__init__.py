"""The pure half of the DHT: no I/O here, by contract (tests/test_architecture.py)."""
