"""Decisions without I/O: `book` says what a relay grants to whom."""
