"""One player per protocol."""
