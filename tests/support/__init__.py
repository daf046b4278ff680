"""What several tests play with."""
