"""Decisions without I/O: `answers` judges an address by what peers say of it."""
