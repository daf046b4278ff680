"""Other programs against ours: js-libp2p, py-libp2p, and the PyPI package shardcast."""
