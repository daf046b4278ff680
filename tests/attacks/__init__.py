"""What strangers try, run against the real thing: each attack must cost its author alone."""
