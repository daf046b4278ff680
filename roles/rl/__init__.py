"""The learning recipe: `recipe` (its numbers), `losses`, `advantage`, and `gate`.

The gate says whether a run has learned.
"""
