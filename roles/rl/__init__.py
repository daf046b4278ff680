"""The learning recipe: numbers, losses, advantages, and the gate that a run must pass."""
