"""Hostile peers against a live node: what `python -m bench attacks` and `strangers` measure."""
