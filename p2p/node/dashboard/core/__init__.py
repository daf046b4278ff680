"""What a dashboard shows: pure by contract. `picture` draws it."""
