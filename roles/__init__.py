"""Jobs of a node: trainer, inference, validator, and what they need: engines, environments,
recipe, run."""
