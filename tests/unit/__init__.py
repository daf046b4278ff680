"""Single modules and cores, without processes and without real time."""
