"""One suite for each seam: production's and the simulator's implementations pass the same."""
