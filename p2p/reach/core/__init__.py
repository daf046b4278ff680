"""Decisions without I/O: `answers` judges an address, `verdict` a host; `relays` chooses
relays."""
