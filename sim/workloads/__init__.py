"""What scenarios run: the only part of the simulator that may import roles."""
