"""Real processes, sockets and command lines, as a user would start them."""
