"""Decisions without I/O."""
