"""What all parts of the coordinator run on: event loop, clock, threads, byte budgets, metrics."""
