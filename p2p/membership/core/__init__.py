"""Membership's decisions: pure by contract, events and time in, effects out."""
