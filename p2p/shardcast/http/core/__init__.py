"""HTTP as pure functions, in one file: `answers`."""
