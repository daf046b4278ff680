"""Planted bugs: each must be found by a storm, so that a real one of its kind would be."""

from __future__ import annotations

MUTANTS = {}
