"""libp2p's wire (Noise, yamux, multistream-select): machines without I/O, and trio drivers."""
