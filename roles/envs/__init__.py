"""Environments: task sources with checkers."""
