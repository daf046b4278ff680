"""The simulator, and production code in it: scenarios, storms of faults, planted bugs."""
