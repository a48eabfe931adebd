"""What every part of the coordinator runs on: event loop, clock, threads, byte budgets, metrics."""
