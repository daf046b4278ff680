"""Engines: what samples, scores and trains a policy."""
