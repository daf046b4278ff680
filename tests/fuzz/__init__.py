"""Random and mutated bytes for every parser `_untrusted`: it raises `BadMessage` or nothing."""
