"""libp2p's wire: Noise, yamux and multistream-select as machines without I/O, and their trio
drivers.
"""
