"""Worker processes: `start` opens one, `streams` carries its frames."""
