"""The learning recipe: numbers, losses, advantages."""
