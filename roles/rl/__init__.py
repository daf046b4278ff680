"""The learning recipe: its numbers, losses and advantages, and the gate that says whether a run
learned."""
