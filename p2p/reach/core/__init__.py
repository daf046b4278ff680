"""Decisions without I/O: `verdict` judges an address and a host; `relays` chooses relays."""
